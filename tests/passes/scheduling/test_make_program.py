"""What the written plan says, instruction by instruction."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from partc.runtime.plan.program import Instruction, Run, Start, Wait
from tests.builders.plans.compiled_steps import Compiled, compile_step, import_text

STEP = """
step (double[24,SIZE] x, double[24,3] t, double[SIZE,3] W, double[3] b)
    => (double loss, double[SIZE,3] W_next, double[3] b_next)
<double lr = {0.1}, double scale = {0.1}, int64[1] rows = {0}> {
    h = MatMul (x, W)
    y = Add (h, b)
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    dy = Mul (d, scale)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dy)
    db = ReduceSum <keepdims = 0> (dy, rows)
    sW = Mul (dW, lr)
    sb = Mul (db, lr)
    W_next = Sub (W, sW)
    b_next = Sub (b, sb)
}
"""


def compiled(tmp_path: Path, cluster: str, strategy: str = "allreduce", size: int = 4) -> Compiled:
    training = import_text(STEP.replace("SIZE", str(size)), loss="loss", sample_axes={"x": 0, "t": 0})
    return compile_step(training, tmp_path / "out", cluster, strategy, "global")


def shown(instructions: Sequence[Instruction]) -> list[str]:
    def show(instruction: Instruction) -> str:
        match instruction:
            case Run(site=site):
                return f"run {site}"
            case Start(kind=kind, group=group, by_levels=by_levels):
                return f"{kind} {group}{' by levels' * by_levels}"
            case Wait():
                return "wait"
            case _:
                return "store"

    return [show(instruction) for instruction in instructions]


def test_one_host_reduces_once(tmp_path: Path) -> None:
    plan = compiled(tmp_path, "1x4").plan

    assert shown(plan.instructions) == ["run worker", "all_reduce workers", "wait", "run worker"]


def test_hosts_reduce_locally_then_globally(tmp_path: Path) -> None:
    """Local aggregation (parallax.txt, section 5.3.2)."""
    plan = compiled(tmp_path, "2x4", size=30_000).plan

    assert shown(plan.instructions) == ["run worker", "all_reduce workers by levels", "wait", "run worker"]


def test_short_sums_go_among_all_workers_at_once(tmp_path: Path) -> None:
    plan = compiled(tmp_path, "2x4").plan

    assert shown(plan.instructions) == ["run worker", "all_reduce workers", "wait", "run worker"]


def test_hosts_of_one_worker_need_no_second_level(tmp_path: Path) -> None:
    plan = compiled(tmp_path, "3x1").plan

    assert [line for line in shown(plan.instructions) if line not in ("wait", "run worker")] == [
        "all_reduce workers"
    ]


def test_servers_pull_push_and_update(tmp_path: Path) -> None:
    plan = compiled(tmp_path, "2x2s", "ps").plan

    told = shown(plan.instructions)
    kinds = [line for line in told if line not in ("wait", "store")]
    steps = ["all_gather servers", "broadcast host", "reduce host", "reduce_scatter servers"]
    places = [kinds.index(step) for step in steps]
    assert places == sorted(places)
    assert "run worker" in kinds[places[1] : places[2]]
    assert "run server" in kinds[places[3] :]
    assert all(rank.sites == ("server",) for rank in plan.ranks if rank.replica is None)


def test_ranks_share_their_segments(tmp_path: Path) -> None:
    """The size of the output follows the number of different programs, not of replicas."""
    few, many = compiled(tmp_path / "few", "1x2").folder, compiled(tmp_path / "many", "1x8").folder

    counts = [len(list((folder.path / "segments").iterdir())) for folder in (few, many)]

    assert counts == [2, 2]


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_both_ends_of_a_reduction_lie_in_one_place(tmp_path: Path, strategy: str) -> None:
    plan = compiled(tmp_path, "2x2", strategy).plan

    places: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for piece in plan.slices:
        places.setdefault((piece.buffer, piece.offset), set()).add(piece.shape)
    assert all(len(shapes) == 1 for shapes in places.values())
    sizes = {buffer.name: buffer.elements for buffer in plan.buffers}
    written = {value for i in plan.instructions if isinstance(i, Start) for value in i.writes}
    assert set(sizes) <= written


def test_every_start_is_waited_for_before_its_results_are_read(tmp_path: Path) -> None:
    for strategy in ("allreduce", "ps", "hybrid"):
        plan = compiled(tmp_path / strategy, "2x2", strategy).plan
        under_way: dict[int, set[str]] = {}
        placed = {
            buffer.name: {s.value for s in plan.slices if s.buffer == buffer.name} for buffer in plan.buffers
        }
        for instruction in plan.instructions:
            match instruction:
                case Start(tag_id=tag, writes=writes):
                    under_way[tag] = {v for name in writes for v in placed.get(name, {name})}
                case Wait(tag_id=tag):
                    del under_way[tag]
                case Run(reads=reads):
                    moving = set().union(*under_way.values())
                    assert not moving & {value for _, value in reads}
        assert not under_way
