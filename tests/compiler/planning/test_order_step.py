"""The order that is taken is about as quick as any that was tried, as plans are simulated."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.planning import order_step
from partc.models.catalogue import build_model
from partc.passes.scheduling.schedule import Item
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches
from tests.sampling import sampled

Orders = Sequence[list[Item]]


def recurrent(batch: int = 8, cells: int = 192) -> onnx.ModelProto:
    sizes = {"layers": 3, "steps": 6, "cells": cells, "embedding": cells, "vocab": 60}
    forward = build_model("rnnlm", batch=batch, **sizes)
    return build_training_graph(forward, loss="loss", optimizer=SGD(0.1))


def wide() -> onnx.ModelProto:
    forward = build_model("mlp", sizes=(256, 1024, 1024, 512, 8), batch=16)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))


def translating() -> onnx.ModelProto:
    sizes = {"steps": 4, "cells": 128, "embedding": 128, "source_vocab": 50, "target_vocab": 50}
    forward = build_model("flexflow_nmt", batch=8, **sizes)
    return build_training_graph(forward, loss="loss", optimizer=SGD(0.1))


STEPS: dict[str, Callable[[], onnx.ModelProto]] = {
    "recurrent": recurrent,
    "wide": wide,
    "translating": translating,
}
CASES = [
    (step, cluster, strategy)
    for step in STEPS
    for cluster, strategy in (
        ("2x1", "allreduce"),
        ("2x2", "allreduce"),
        ("2x2", "hybrid"),
        ("2x2", "tensor=2"),
        ("2x2", "fsdp"),
        ("2x2", "one-weird-trick" if step == "wide" else "layerwise"),
        ("1x4", "tensor=4"),
    )
]


def all_seconds(
    step: str, cluster: str, strategy: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, list[float]]:
    """Return the simulated seconds of the plan, and in each order that was tried, the graph's first."""
    training = import_training_graph(STEPS[step]())
    taken = compile_step(training, folder / "taken", cluster, strategy, "global").plan.predicted_step_s
    each: list[float] = []
    counts: list[int] = []

    def take(orders: Orders, *_: object) -> Orders:
        counts.append(len(orders))
        return [orders[len(each)]]

    monkeypatch.setattr(order_step, "_quickest", take)
    while not each or len(each) < counts[-1]:
        training = import_training_graph(STEPS[step]())
        plan = compile_step(training, folder / f"order{len(each)}", cluster, strategy, "global").plan
        each.append(plan.predicted_step_s)
    return taken, each


@pytest.mark.parametrize(("step", "cluster", "strategy"), sampled(CASES, range(0, len(CASES), 5)))
def test_no_order_that_was_tried_is_much_quicker_than_the_one_taken(
    step: str, cluster: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, each = all_seconds(step, cluster, strategy, tmp_path, monkeypatch)

    assert taken <= 1.05 * min(each)


def test_sums_of_a_recurrence_begin_while_earlier_layers_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of the graph goes back through all layers at once, so that all sums come last."""
    monkeypatch.setitem(STEPS, "recurrent", partial(recurrent, batch=128, cells=448))
    taken, (of_graph, *_) = all_seconds("recurrent", "2x1", "allreduce", tmp_path, monkeypatch)

    assert taken < 0.9 * of_graph


@pytest.mark.parametrize("strategy", ["allreduce", "hybrid"])
def test_what_is_summed_early_trains_as_one_device(strategy: str, tmp_path: Path) -> None:
    compiled = compile_step(import_training_graph(recurrent()), tmp_path / "out", "2x1", strategy, "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, high=60))
