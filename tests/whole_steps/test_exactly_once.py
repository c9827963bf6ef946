"""Every update happens exactly once per step, whoever does it.

on servers     the owner of the rows, and nobody else
replicated     every rank that keeps a copy updates its copy once, from the same aggregated gradient
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.runtime.execution import in_process
from partc.runtime.execution.executor import Executor
from partc.runtime.execution.in_process import RanksInProcess
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Instruction, Rank, Run, Store
from partc.runtime.plan.variables import VariablePiece
from tests.builders.plans.compiled_steps import Compiled, compile_step, random_batches
from tests.whole_steps.test_distributed_numerics import imported

STEPS = 3
MODELS = ("foreign adam", "averages and a counter", "lm, adagrad, clipped", "mlp, momentum, clipped")
CLUSTERS = ("2x2", "3x1", "2x2s")
STRATEGIES = ("ps", "allreduce", "hybrid")
CASES = list(product(MODELS, CLUSTERS, STRATEGIES))


class Counted:
    """Executions as they happen: writes of variables, and of every node of the segments that make them."""

    def __init__(self, done: Compiled) -> None:
        self.writes: Counter[tuple[int, str]] = Counter()  # (rank, value that holds a variable)
        self.nodes: Counter[tuple[int, str, str]] = Counter()  # (rank, site, node)
        self._names = {
            f"segments/{path.name}": [node.name for node in onnx.load(path).graph.node]
            for path in (done.folder.path / "segments").iterdir()
        }

    def of(self, rank: Rank) -> object:
        variables = {piece.value for piece in rank.pieces}

        def observe(program: Iterable[Instruction]) -> Iterator[Instruction]:
            for instruction in program:
                yield instruction
                match instruction:
                    case Run(writes=writes, segment=segment, site=site):
                        self.writes.update((rank.rank, value) for _, value in writes if value in variables)
                        self.nodes.update((rank.rank, site, name) for name in self._names[segment])
                    case Store(target=target) if target in variables:
                        self.writes[rank.rank, target] += 1

        return observe


def counted_run(done: Compiled, monkeypatch: pytest.MonkeyPatch) -> tuple[Counted, dict[str, np.ndarray]]:
    counted = Counted(done)

    def make(plan: object, rank: Rank, *rest: object) -> Executor:
        *parts, _ = rest
        return Executor(plan, rank, *parts, observe=counted.of(rank))  # type: ignore[arg-type]

    monkeypatch.setattr(in_process, "Executor", make)
    ranks = RanksInProcess(PlanFolder(done.plan, done.folder.path))
    for batch in random_batches(done.plan, STEPS, high=7):
        ranks.step(batch)
    return counted, ranks.variables()


def check(name: str, cluster: str, strategy: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = compile_step(imported(name), folder / "out", cluster, strategy)

    counted, variables = counted_run(done, monkeypatch)

    kept = [(rank.rank, piece.value) for rank in done.plan.ranks for piece in rank.pieces]
    assert counted.writes == Counter(dict.fromkeys(kept, STEPS))
    assert set(counted.nodes.values()) == {STEPS}
    for variable in done.plan.variables:
        pieces = [
            piece for rank in done.plan.ranks for piece in rank.pieces if piece.variable == variable.name
        ]
        assert_owned_once(pieces, variable.shape)
    if "count" in variables:
        assert variables["count"] == STEPS


def assert_owned_once(pieces: list[VariablePiece], shape: tuple[int, ...]) -> None:
    """Rows on servers are cut without gap or overlap; what is not cut is whole wherever it is."""
    rows = sorted(piece.box.ranges[0][0] for piece in pieces if piece.box is not None)
    if rows:
        assert len(rows) == len(pieces), "on servers, and somewhere else too"
        assert [start for start, _ in rows] == [0, *(stop for _, stop in rows[:-1])]
        assert rows[-1][1] == shape[0]


@pytest.mark.parametrize(("name", "cluster", "strategy"), CASES[::5])
def test_every_variable_is_written_once_a_step_by_each_who_keeps_it(
    name: str, cluster: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(name, cluster, strategy, tmp_path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(("name", "cluster", "strategy"), CASES)
def test_exactly_once_in_every_combination(
    name: str, cluster: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(name, cluster, strategy, tmp_path, monkeypatch)
