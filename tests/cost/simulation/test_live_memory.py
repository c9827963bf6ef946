"""What values take is told from the plan: held against every rank's own environment while it trains."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from partc.compiler.api import compile
from partc.cost.simulation.memory import check_memory, memory_of
from partc.runtime.errors import DoesNotFit
from partc.runtime.execution.environment import Environment
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.plan.plan_folder import PlanFolder
from tests.builders.plans.compiled_steps import cluster_of, random_batches
from tests.builders.plans.deep_mlp import BY_1F1B, deep_mlp
from tests.builders.plans.small_devices import small_devices


def segments_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "segments").iterdir()}


def measured_bytes(folder: PlanFolder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the most bytes of values in each rank's environment, between any two instructions."""
    most: dict[int, int] = defaultdict(int)
    order: list[int] = []
    drop = Environment.drop

    def counted(self: Environment, names: Iterable[str]) -> None:
        if id(self) not in most:
            order.append(id(self))
        moving = (tensor for name, tensor in self.tensors.items() if name not in self.fixed)
        most[id(self)] = max(most[id(self)], sum(tensor.numpy().nbytes for tensor in moving))
        drop(self, names)

    monkeypatch.setattr(Environment, "drop", counted)
    train_in_process(folder, random_batches(folder.plan, 2, high=3))
    return [most[number] for number in order]


STRATEGIES = [
    "data=4",
    "fsdp",
    "tensor=4",
    "data=4,microbatches=4",
    "pipeline=4,microbatches=8",
    "pipeline=4,microbatches=1",
    "pipeline=2,data=2,microbatches=4",
    "pipeline=2,tensor=2,microbatches=4",
    "pipeline=2,fsdp=2,microbatches=4",
]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_kept_is_what_every_rank_was_seen_to_keep(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_of("1x4")
    folder = compile(deep_mlp(), cluster, tmp_path / "out", strategy=strategy, batch="global")

    told = [need.values_bytes for need in memory_of(folder.plan, cluster)]

    assert told == measured_bytes(folder, monkeypatch)


def test_an_earlier_stage_keeps_more_micro_batches(tmp_path: Path) -> None:
    cluster = cluster_of("1x4")
    strategy = "pipeline=4,microbatches=8"
    plan = compile(deep_mlp(), cluster, tmp_path / "out", strategy=strategy, batch="global", **BY_1F1B).plan

    kept = [need.values_bytes for need in memory_of(plan, cluster)]

    assert kept[0] > kept[2]


def test_no_more_micro_batches_are_under_way_than_a_device_has_room_for(tmp_path: Path) -> None:
    cluster, strategy = cluster_of("1x4"), "pipeline=2,microbatches=8"
    many = compile(deep_mlp(), cluster, tmp_path / "many", strategy=strategy, batch="global").plan
    few = compile(deep_mlp(), cluster, tmp_path / "few", strategy=strategy, batch="global", **BY_1F1B).plan
    most, least = (max(n.certain_bytes for n in memory_of(plan, cluster)) for plan in (many, few))
    assert least < most

    small = small_devices("1x4", least)
    plan = compile(deep_mlp(), small, tmp_path / "out", strategy=strategy, batch="global").plan

    assert plan.instructions == few.instructions
    assert segments_in(tmp_path / "out") == segments_in(tmp_path / "few")


def test_devices_with_less_than_a_rank_keeps_are_refused(tmp_path: Path) -> None:
    cluster = cluster_of("1x4")
    strategy = "pipeline=4,microbatches=8"
    plan = compile(deep_mlp(), cluster, tmp_path / "out", strategy=strategy, batch="global").plan
    most = max(need.certain_bytes for need in memory_of(plan, cluster))

    check_memory(plan, small_devices("1x4", most))
    with pytest.raises(DoesNotFit, match="kept between segments"):
        check_memory(plan, small_devices("1x4", most - 1))
