"""Every kind, for members that send or do not, in place or not, in memory."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from partc.runtime.data.initial import InitialValues
from partc.runtime.errors import BadPlan
from partc.runtime.execution.arrays import Array, DeviceArrays, HostArrays
from partc.runtime.execution.device import ExecutionDevice
from partc.runtime.execution.environment import Environment
from partc.runtime.plan.moves import find_moves
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Buffer, Exchange, Kind, Slice, Start
from partc.runtime.transports.communication import Part, part_of, stays_the_same
from partc.runtime.transports.host_staging import HostStaging
from partc.runtime.transports.in_memory import Board, InMemoryTransport
from partc.runtime.transports.nccl import ChannelKey, NCCLChannel, NCCLTransport
from partc.runtime.transports.transport import Transport
from tests.builders.plans.hand_made_plans import plan_of, rank
from tests.checks.nccl_in_memory import open_channels, replace_modules

GROUP = {"all": (2, 0, 1)}  # rank 2 is the root and only serves
PLAN = plan_of(
    [rank(0, ("worker",), 0, GROUP), rank(1, ("worker",), 1, GROUP), rank(2, ("server",), None, GROUP)],
    [],
    buffers=(
        Buffer("b", "float32", 4, ("worker", "server")),
        Buffer("c", "float32", 4, ("worker", "server")),
    ),
    slices=(Slice("x", "b", 0, (2, 2)), Slice("y", "c", 0, (2, 2))),
)
RANKS = PLAN.ranks


class OtherMemory(HostArrays):
    """As if arrays lay on a GPU: no engine sees more of them than copies."""

    def in_host_memory(self, array: Array) -> Array:
        return array.copy()


class GpuMemory(HostArrays):
    """As if arrays lay where NCCL reaches them."""


@pytest.fixture(params=["in host memory", "by way of it", "by NCCL"])
def environments(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> list[Environment]:
    """Rank r's x and y hold 10 (r + 1) + 0..3."""
    made = [
        Environment(PLAN, one, ExecutionDevice("cpu", 0, 1), InitialValues(PlanFolder(PLAN, tmp_path)))
        for one in RANKS
    ]
    for index, environment in enumerate(made):
        for name in ("x", "y"):
            environment.put(name, 10.0 * (index + 1) + np.arange(4, dtype=np.float32).reshape(2, 2))
        if request.param == "by way of it":
            environment.arrays = OtherMemory()
        if request.param == "by NCCL":
            environment.arrays = GpuMemory()
    replace_modules(monkeypatch)
    return made


def side_of(
    side: InMemoryTransport, arrays: DeviceArrays, channels: dict[ChannelKey, NCCLChannel]
) -> Transport:
    """Return what a rank with such arrays communicates by."""
    if isinstance(arrays, GpuMemory):
        staging = HostStaging(side, OtherMemory())
        return NCCLTransport(channels, set(GROUP.values()), arrays, staging, side.traffic)
    return HostStaging(side, arrays) if isinstance(arrays, OtherMemory) else side


def exchange(environments: list[Environment], start: Start) -> InMemoryTransport:
    """Carry one communication out; return rank 0's side."""
    return exchange_all(environments, start)[0]


def exchange_all(environments: list[Environment], start: Start) -> list[InMemoryTransport]:
    """Carry one communication out; return every rank's side."""
    board = Board()
    transports = [InMemoryTransport(board) for _ in RANKS]
    parts = [
        part_of(start, one, GROUP["all"], environment)
        for one, environment in zip(RANKS, environments, strict=True)
    ]
    plan = replace(PLAN, instructions=(start,))
    channels = open_channels(plan, GROUP.values())
    sides = [
        side_of(transport, environment.arrays, channels[one.rank])
        for transport, environment, one in zip(transports, environments, RANKS, strict=True)
    ]
    handles = [side.start(part) for side, part in zip(sides, parts, strict=True)]
    assert all(handle.done() for handle in handles)
    for environment, part, handle in zip(environments, parts, handles, strict=True):
        if part.lands:
            for name, dense in zip(start.writes, part.dense, strict=False):
                if not dense.is_placed:
                    environment.put(name, dense.target)
            for name, array in zip(start.writes, handle.rows(), strict=False):
                environment.put(name, array)
    return transports


def flat(environment: Environment, name: str) -> list[float]:
    return environment.array(name).reshape(-1).tolist()


@pytest.mark.parametrize(("write", "source"), [("x", "x"), ("y", "x"), ("new", "x")])
def test_who_does_not_send_adds_nothing_to_a_sum(
    environments: list[Environment], write: str, source: str
) -> None:
    exchange(environments, Start(0, "all_reduce", "all", "worker", "worker", (source,), (write,)))

    assert flat(environments[0], write) == [30, 32, 34, 36]
    assert flat(environments[1], write) == [30, 32, 34, 36]


@pytest.mark.parametrize(("reduction", "expected"), [("max", [20, 21, 22, 23]), ("min", [10, 11, 12, 13])])
def test_who_does_not_send_is_neutral_in_a_maximum_and_a_minimum(
    environments: list[Environment], reduction: str, expected: list[float]
) -> None:
    exchange(environments, Start(0, "reduce", "all", "worker", "server", ("x",), ("x",), reduction))

    assert flat(environments[2], "x") == expected
    assert flat(environments[0], "x") == [10, 11, 12, 13]


@pytest.mark.parametrize("write", ["x", "y", "new"])
def test_a_broadcast_comes_from_the_root(environments: list[Environment], write: str) -> None:
    environments[0].put("new", np.zeros((2, 2), np.float32))
    if write == "new":
        with pytest.raises(BadPlan, match="size of 'new' is not known"):
            part_of(
                Start(0, "broadcast", "all", "server", "worker", ("unknown",), ("new",)),
                RANKS[0],
                GROUP["all"],
                environments[0],
            )
    start = Start(0, "broadcast", "all", "server", "worker", ("x",), (write,))

    exchange(environments, start)

    assert flat(environments[0], write) == flat(environments[1], write) == [30, 31, 32, 33]


@pytest.mark.parametrize("write", ["x", "y", "region"])
def test_reduced_regions_land_with_their_owner(environments: list[Environment], write: str) -> None:
    start = Start(0, "reduce_scatter", "all", "worker", "worker", ("x",), (write,), counts=(0, 3, 1))

    exchange(environments, start)

    first, second = flat(environments[0], write), flat(environments[1], write)
    assert (first if write == "region" else first[:3]) == [30, 32, 34]
    assert (second if write == "region" else second[3:]) == [36]


@pytest.mark.parametrize("write", ["x", "y", "whole"])
def test_regions_are_gathered_in_group_order(environments: list[Environment], write: str) -> None:
    start = Start(0, "all_gather", "all", "worker", "worker", ("x",), (write,), counts=(0, 3, 1))

    exchange(environments, start)

    assert flat(environments[0], write) == flat(environments[1], write) == [10, 11, 12, 23]


def test_counts_that_do_not_cut_the_rows_are_refused(environments: list[Environment]) -> None:
    environments[0].put("rows", np.zeros((3, 2)))
    environments[0].put("counts", np.array([1, 1, 0]))
    start = Start(
        7, "all_to_all_rows", "all", "worker", "worker", ("rows", "counts"), ("r", "c"), label="push"
    )

    with pytest.raises(
        BadPlan, match=r"\[1, 1, 0\] do not cut 3 rows among 3 members\n  at:  communication 7 \(push\)"
    ):
        part_of(start, RANKS[0], GROUP["all"], environments[0])


def test_a_region_of_another_size_is_refused(environments: list[Environment]) -> None:
    start = Start(0, "reduce_scatter", "all", "worker", "worker", ("x",), ("x",), counts=(0, 3, 3))

    with pytest.raises(BadPlan, match="'x' has 4 elements, 6 were planned"):
        part_of(start, RANKS[0], GROUP["all"], environments[0])


def test_traffic_counts_values_and_ids_apart_and_leaves_out_what_stays(
    environments: list[Environment],
) -> None:
    for index in (0, 1):
        environments[index].put("ids", np.arange(4))
        environments[index].put("rows", np.ones((4, 2), np.float32))
        environments[index].put("counts", np.array([2, 1, 1]))
    reads, writes = ("ids", "rows", "counts"), ("ids_in", "rows_in", "counts_in")

    transport = exchange(environments, Start(0, "all_to_all_rows", "all", "worker", "worker", reads, writes))

    assert transport.traffic.payload_bytes["all_to_all_rows"] == 3 * 8
    assert transport.traffic.ids_bytes["all_to_all_rows"] == 3 * 8
    np.testing.assert_array_equal(environments[0].array("counts_in"), [0, 1, 1])
    np.testing.assert_array_equal(environments[0].array("ids_in"), [2, 2])


@pytest.mark.parametrize("write", ["y", "new"])
@pytest.mark.parametrize(
    ("kind", "expected", "sent"),
    [
        ("shift_ahead", ([0, 0, 0, 0], [10, 11, 12, 13]), (16, 0)),
        ("shift_back", ([20, 21, 22, 23], [0, 0, 0, 0]), (16, 16)),
    ],
)
def test_a_shift_brings_a_neighbours_value_and_zeros_at_the_end(
    environments: list[Environment],
    kind: Kind,
    expected: tuple[list[float], list[float]],
    sent: tuple[int, int],
    write: str,
) -> None:
    """In the group rank 0 is behind rank 2, which sends nothing, and rank 1 behind rank 0."""
    start = Start(0, kind, "all", "worker", "worker", ("x",), (write,))

    transports = exchange_all(environments, start)

    assert (flat(environments[0], write), flat(environments[1], write)) == expected
    assert tuple(side.traffic.payload_bytes[kind] for side in transports[:2]) == sent


@pytest.mark.parametrize("dtype", ["float32", "float16", "bool"])
def test_an_exchange_brings_each_the_part_that_he_wants(environments: list[Environment], dtype: str) -> None:
    """Rows of [2, 4], one on rank 0, one on rank 1, become columns: of rank 1 all but the third."""
    whole = np.arange(8).reshape(2, 4).astype(dtype)
    environments[0].put("row", whole[:1])
    environments[1].put("row", whole[1:])
    rows = (((0, 1),), ((0, 4),)), (((1, 2),), ((0, 4),))
    columns = (((0, 2),), ((0, 2), (3, 4))), (((0, 2),), ((2, 3),))
    has, wants = (None, *rows), (columns[1], None, columns[0])  # by position: ranks 2, 0, 1
    moves = find_moves(has, wants, ["a", "b", "c"])
    account = Exchange(dtype, (2, 4), has, wants, moves)
    start = Start(0, "exchange", "all", "worker", "server", ("row",), ("part",), exchange=account)
    plays = [replace(one, sites=("worker", "server")) for one in RANKS]

    board, handles = Board(), []
    channels = open_channels(replace(PLAN, instructions=(start,)), GROUP.values())
    for one, environment in zip(plays, environments, strict=True):
        part = part_of(start, one, GROUP["all"], environment)
        side = InMemoryTransport(board)
        used = side_of(side, environment.arrays, channels[one.rank])
        handles.append((part, used.start(part), side))

    assert all(handle.done() for _, handle, _ in handles)
    np.testing.assert_array_equal(handles[2][0].dense[0].target, whole[:, 2:3])
    np.testing.assert_array_equal(handles[1][0].dense[0].target, whole[:, [0, 1, 3]])
    size = np.dtype(dtype).itemsize
    assert [side.traffic.payload_bytes["exchange"] for _, _, side in handles] == [4 * size, size, 0]
    assert [side.traffic.exchanged.values_received for _, _, side in handles] == [0, 3 * size, 2 * size]


@pytest.mark.parametrize("write", ["x", "y", "moving"])
@pytest.mark.parametrize(
    "kind", ["all_reduce", "reduce", "broadcast", "reduce_scatter", "all_gather", "shift_ahead"]
)
def test_a_part_stays_the_same_where_another_step_would_find_the_same_memory(
    environments: list[Environment], kind: Kind, write: str
) -> None:
    start = Start(0, kind, "all", "worker", "worker", ("x",), (write,), counts=(0, 3, 1))
    plays = [replace(one, sites=("worker", "server")) for one in RANKS]

    for one, environment in zip(plays, environments, strict=True):
        environment.put("moving", np.zeros((2, 2), np.float32))
        before = part_of(start, one, GROUP["all"], environment)
        for name in ("x", "y", "moving"):
            environment.put(name, np.full((2, 2), 5, np.float32))
        after = part_of(start, one, GROUP["all"], environment)

        is_root = one.rank == 2
        assert stays_the_same(before, environment) == (write == "x" and (kind != "broadcast" or is_root))
        if stays_the_same(before, environment):
            assert memory_of(before) == memory_of(after)
            assert (environment.array("x") == 5).all(), "another step's part changes nothing"


def memory_of(part: Part) -> list[tuple[int, int]]:
    return [(array.ctypes.data, array.size) for dense in part.dense for array in (dense.source, dense.target)]
