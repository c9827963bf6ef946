"""What one rank sends another receives, whatever the kind; ids apart from values."""

from pathlib import Path

import numpy as np
import pytest

from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.program import Kind, Start
from partc.runtime.transports.communication import Dense, Part
from partc.runtime.transports.exchanged import Exchanged
from tests.runtime.jobs.test_runner import PLANS

MEMBERS = (4, 5, 6, 7)


@pytest.mark.parametrize("name", PLANS)
def test_all_that_is_sent_is_received(name: str, tmp_path: Path) -> None:
    make, batches = PLANS[name]

    ranks = train_in_process(make(tmp_path / "out"), batches).exchanged.values()

    assert sum(rank.values_sent for rank in ranks) == sum(rank.values_received for rank in ranks) > 0
    assert sum(rank.ids_sent for rank in ranks) == sum(rank.ids_received for rank in ranks)


def part(kind: Kind, position: int, **brought: object) -> Part:
    start = Start(0, kind, "g", "worker", "worker", ("x",), ("y",))
    return Part(start, MEMBERS, position, True, True, **brought)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "position", "elements", "expected"),
    [
        ("all_reduce", 0, (8, 8), (12, 12)),
        ("reduce", 0, (8, 8), (0, 24)),
        ("reduce", 1, (8, 8), (8, 0)),
        ("broadcast", 0, (8, 8), (24, 0)),
        ("broadcast", 1, (8, 8), (0, 8)),
        ("reduce_scatter", 1, (8, 2), (6, 6)),
        ("all_gather", 1, (2, 8), (6, 6)),
        ("shift_ahead", 0, (8, 8), (8, 0)),
        ("shift_ahead", 1, (8, 8), (8, 8)),
        ("shift_ahead", 3, (8, 8), (0, 8)),
        ("shift_back", 0, (8, 8), (0, 8)),
        ("shift_back", 3, (8, 8), (8, 0)),
    ],
)
def test_a_dense_kind_moves(
    kind: Kind, position: int, elements: tuple[int, int], expected: tuple[int, int]
) -> None:
    source, target = (np.zeros(count, np.int8) for count in elements)
    counted = Exchanged()

    counted.add(part(kind, position, dense=(Dense(source, target),)), ())

    assert (counted.values_sent, counted.values_received) == expected


@pytest.mark.parametrize(
    ("kind", "position", "counts", "landed", "expected"),
    [
        ("gather_rows", 0, (), (0, 3, 1, 2), (0, 6)),
        ("gather_rows", 2, (), (0, 3, 1, 2), (3, 0)),
        ("all_gather_rows", 1, (), (0, 3, 1, 2), (9, 3)),
        ("all_to_all_rows", 1, (1, 2, 0, 0), (0, 2, 3, 1), (1, 4)),
        ("scatter_rows", 0, (1, 1, 0, 1), None, (2, 0)),
        ("scatter_rows", 1, (), None, (0, 5)),
    ],
)
def test_a_row_kind_moves_what_is_not_its_own(
    kind: Kind,
    position: int,
    counts: tuple[int, ...],
    landed: tuple[int, ...] | None,
    expected: tuple[int, int],
) -> None:
    """A row is an id of 8 bytes and a value of 1; `landed`: rows that came from each member."""
    supplied = 0 if kind == "scatter_rows" and position else 3
    arrived = sum(landed) if landed else 5
    outcome = (rows_of(arrived), ids_of(arrived), *([np.array(landed)] if landed else []))
    rows = (rows_of(supplied), ids_of(supplied)) if supplied else ()
    counted = Exchanged()

    counted.add(part(kind, position, rows=rows, counts=counts), outcome)

    assert (counted.values_sent, counted.values_received) == expected
    assert (counted.ids_sent, counted.ids_received) == tuple(8 * count for count in expected)


def rows_of(count: int) -> np.ndarray:
    return np.zeros((count, 1), np.bool_)


def ids_of(count: int) -> np.ndarray:
    return np.zeros(count, np.int64)
