"""Ranks of one replica read the same data, draw the same numbers and have the same shard."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from partc.runtime.data.feeds import open_source
from partc.runtime.data.sharded import ShardedSource
from partc.runtime.data.step_draws import draw_share, draw_total
from partc.runtime.interactive.share_feeds import share_feeds
from partc.runtime.plan.members import leaders_of, shard_values
from partc.runtime.plan.program import Plan
from partc.runtime.plan.variables import DataInput, DrawnInput, ShardInput, Uniform
from tests.builders.plans.hand_made_plans import plan_of, rank, with_changes

# Ranks stand in no order of replicas, and a server among them.
REPLICAS = (1, 0, None, 0, 1, 1)


@pytest.fixture
def plan() -> Plan:
    ranks = [rank(r, ("server",) if of is None else ("worker",), of, {}) for r, of in enumerate(REPLICAS)]
    bare = plan_of(
        ranks, [], data_inputs=(DataInput("x", "float32", (4, 3), 0), DataInput("lr", "float32", (), None))
    )
    return with_changes(
        bare,
        drawn_inputs=(DrawnInput("mask", "float32", (4, 2), Uniform(0.0, 1.0, 1), True, sample_axis=0),),
        shard_inputs=(ShardInput("n", "int64", "num_shards"), ShardInput("own", "int64", "shard_id")),
    )


def assert_parts_by_replica(
    plan: Plan, shares: dict[int, dict[str, np.ndarray]], total: dict[str, np.ndarray]
) -> None:
    for rank_number, replica in enumerate(REPLICAS):
        for name, array in shares[rank_number].items():
            part = array if replica is None or not array.ndim else total[name][4 * replica : 4 * replica + 4]
            np.testing.assert_array_equal(
                array, part if array.ndim else total[name], err_msg=f"{rank_number}: {name}"
            )


@pytest.mark.parametrize("kind", ["synthetic", "file", "function"])
def test_ranks_of_a_replica_are_fed_its_samples(
    plan: Plan, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(
        tmp_path / "data.npz",
        allow_pickle=False,
        x=np.arange(60, dtype=np.float32).reshape(20, 3),
        lr=np.float32(2),
    )
    (tmp_path / "fed_batches.py").write_text(
        "import numpy as np\n"
        "def total():\n"
        "    for step in range(3):\n"
        "        yield {'x': np.arange(24, dtype=np.float32).reshape(8, 3) + step, 'lr': np.float32(1)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = {"synthetic": "synthetic", "file": str(tmp_path / "data.npz"), "function": "fed_batches:total"}[
        kind
    ]
    source = open_source(data, plan, seed=4)
    for step in range(3):
        total = source.total(step)
        assert total["x"].shape == (8, 3)
        assert_parts_by_replica(plan, {r.rank: source.share(r, step) for r in plan.ranks}, total)


def test_ranks_of_a_replica_read_its_shard(plan: Plan) -> None:
    def read(num_shards: int, shard_id: int) -> Iterator[dict[str, np.ndarray]]:
        assert num_shards == 2
        while True:
            yield {"x": np.full((4, 3), shard_id, np.float32), "lr": np.float32(shard_id)}

    source = ShardedSource(plan, read, "read")
    for step in range(2):
        assert_parts_by_replica(plan, {r.rank: source.share(r, step) for r in plan.ranks}, source.total(step))


def test_ranks_of_a_replica_draw_the_same(plan: Plan) -> None:
    total = draw_total(plan, {"x": np.zeros((8, 3), np.float32)}, 5, 0)
    drawn = {r.rank: draw_share(plan, r, {}, 5, 0) for r in plan.ranks}

    assert total["mask"].shape == (8, 2)
    assert_parts_by_replica(plan, drawn, total)
    assert [sorted(drawn[r]) for r in range(6)] == [["mask"], ["mask"], [], ["mask"], ["mask"], ["mask"]]


def test_ranks_of_a_replica_have_its_number(plan: Plan) -> None:
    own = [shard_values(plan, r) for r in plan.ranks]

    assert [int(values["n"]) for values in own] == [2] * 6
    assert [int(values["own"]) if "own" in values else None for values in own] == list(REPLICAS)


def test_feeds_are_lists_of_replicas(plan: Plan) -> None:
    total = {"x": np.arange(24, dtype=np.float32).reshape(8, 3), "lr": np.float32(0.5)}

    shares = share_feeds(plan, {"x": np.split(total["x"], 2), "lr": [total["lr"]] * 2})

    assert_parts_by_replica(plan, shares, total)


def test_the_first_rank_of_each_replica_tells_its_outputs(plan: Plan) -> None:
    assert [leader.rank for leader in leaders_of(plan)] == [1, 0]
