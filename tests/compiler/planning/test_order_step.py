"""The order that is taken is about as quick as any that was tried, as plans are simulated."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.planning import order_step
from partc.compiler.search.whole_steps import WholeSteps
from partc.models.catalogue import build_model
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    cluster_of,
    compile_step,
    random_batches,
)
from tests.sampling import sampled


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


def images() -> onnx.ModelProto:
    """Gradients of convolutions are functions."""
    forward = build_model("resnet50", batch=8, width=8, image=64, classes=16, blocks=(1, 2, 1, 1))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))


def words() -> onnx.ModelProto:
    """Tables that servers keep."""
    sizes = {"vocab": 2000, "embedding": 128, "cells": 128, "projection": 64, "steps": 4, "samples": 128}
    return build_training_graph(build_model("lm", batch=16, **sizes), loss="loss", optimizer=SGD(0.1))


STEPS: dict[str, Callable[[], onnx.ModelProto]] = {
    "recurrent": recurrent,
    "wide": wide,
    "translating": translating,
    "images": images,
    "words": words,
    "large recurrent": partial(recurrent, batch=128, cells=448),
}
CASES = [
    (step, cluster, strategy)
    for step in ("recurrent", "wide", "translating")
    for cluster, strategy in (
        ("2x1", "allreduce"),
        ("2x2", "allreduce"),
        ("2x2", "hybrid"),
        ("2x2", "tensor=2"),
        ("2x2", "fsdp"),
        ("2x2", "one-weird-trick" if step == "wide" else "layerwise"),
        ("1x4", "tensor=4"),
        ("2x2s", "allreduce"),
        ("2x2s", "tensor=2"),
    )
] + [("images", "2x2s", strategy) for strategy in ("layerwise", "allreduce", "tensor=2", "spatial=2")]
CASES += [
    (step, cluster, strategy)
    for step, cluster in (("wide", "2x2"), ("wide", "2x2s"), ("words", "2x1"), ("words", "2x2s"))
    for strategy in ("ps", "hybrid")
    if (step, strategy) != ("wide", "hybrid")
]
SAMPLE = range(0, len(CASES), 5)


class Order(NamedTuple):
    """A step in one order: as orders are compared, and as its plan is simulated, seconds."""

    played_s: float
    simulated_s: float


@cache
def all_orders(step: str, cluster: str, strategy: str) -> tuple[float, list[Order]]:
    """Return the simulated seconds of the plan, and every order that was tried, the graph's first.

    Each as it is, and cut at arrivals where that is another: a comparison of its own, behind the first.
    """
    model = STEPS[step]()
    compared: list[list[float]] = []

    def simulated_s() -> float:
        whole = WholeSteps(lambda: import_training_graph(model), cluster_of(cluster), Options(batch="global"))
        compared.clear()
        priced = whole(strategy, strategy)
        assert priced is not None
        return priced.step_s

    def prefer(number: int, is_cut: bool, *asked: Any) -> list[float]:
        compared.append(play(*asked))
        chosen = is_cut if len(compared) > 1 else number
        return [float(place != chosen) for place in range(len(compared[-1]))]

    play = order_step._played
    taken_s, orders, number = simulated_s(), [], 0
    with pytest.MonkeyPatch.context() as patched:
        while not orders or number < len(compared[0]):
            for is_cut in (False, True):
                patched.setattr(order_step, "_played", partial(prefer, number, is_cut))
                own_s = simulated_s()
                assert compared, "several orders are compared"
                if is_cut and len(compared) == 1:
                    break
                orders.append(Order(compared[-1][is_cut if len(compared) > 1 else number], own_s))
            number += 1
    return taken_s, orders


@pytest.mark.parametrize(("step", "cluster", "strategy"), sampled(CASES, SAMPLE))
def test_no_order_that_was_tried_is_much_quicker_than_the_one_taken(
    step: str, cluster: str, strategy: str
) -> None:
    taken_s, orders = all_orders(step, cluster, strategy)

    assert taken_s <= 1.05 * min(order.simulated_s for order in orders)


@pytest.mark.parametrize(("step", "cluster", "strategy"), sampled(CASES, SAMPLE))
def test_orders_are_compared_by_about_what_their_plans_take(step: str, cluster: str, strategy: str) -> None:
    _, orders = all_orders(step, cluster, strategy)

    assert all(order.played_s == pytest.approx(order.simulated_s, rel=0.15) for order in orders)


@pytest.mark.parametrize("cluster", ["2x1", "2x4s"])
def test_sums_one_behind_the_other_are_compared_by_what_they_take(cluster: str) -> None:
    """Members of a sum by levels begin the next while links carry it on."""
    _, orders = all_orders("wide", cluster, "allreduce")

    assert all(order.played_s == pytest.approx(order.simulated_s, rel=0.01) for order in orders)


def test_sums_of_a_recurrence_begin_while_earlier_layers_are_computed() -> None:
    """The order of the graph goes back through all layers at once, so that all sums come last."""
    taken_s, (of_graph, *_) = all_orders("large recurrent", "2x1", "allreduce")

    assert taken_s < 0.9 * of_graph.simulated_s


@pytest.mark.parametrize("strategy", ["allreduce", "hybrid"])
def test_what_is_summed_early_trains_as_one_device(strategy: str, tmp_path: Path) -> None:
    compiled = compile_step(import_training_graph(recurrent()), tmp_path / "out", "2x1", strategy, "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, high=60))
