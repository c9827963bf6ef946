"""FlexFlow's models and the mixture of experts: differentiated, compiled and trained on 2 x 2, all small."""

from pathlib import Path

import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad, Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from tests.builders.plans.compiled_steps import assert_trains_as_one_device, compile_step, random_batches

RECURRENT: dict[str, object] = {"embedding": 6, "cells": 4, "steps": 3, "dtype": "float64"}
SMALL: dict[str, dict[str, object]] = {
    "lenet": {"image": 16},
    "alexnet": {"width": 4, "cells": 8, "image": 63, "classes": 6},
    "resnet101": {"width": 4, "image": 32, "classes": 6, "blocks": (1, 1, 1, 1)},
    "rnntc": {**RECURRENT, "vocab": 30, "layers": 3, "classes": 4},
    "rnnlm": {**RECURRENT, "vocab": 30},
    "flexflow_nmt": {**RECURRENT, "source_vocab": 30, "target_vocab": 26},
    "moe": {
        "vocab": 30, "cells": 6, "steps": 3, "experts": 4, "chosen": 2, "expert_cells": 5, "dtype": "float64",
    },
}  # fmt: skip


def step(name: str) -> onnx.ModelProto:
    forward = build_model(name, **SMALL[name], batch=4)
    if forward.graph.output[0].name == "loss":
        return build_training_graph(forward, loss="loss", optimizer=Adagrad(0.5))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))


# (strategy, batch) -> whom it takes but a few seconds
STRATEGIES = {
    ("hybrid", "per-replica"): tuple(name for name in SMALL if name not in ("moe", "resnet101")),
    ("tensor=2", "global"): ("moe",),
    ("auto", "global"): ("alexnet",),
    ("ps", "global"): (),
}
CASES = [
    pytest.param(name, *kind, marks=[] if name in quick else pytest.mark.long)
    for kind, quick in STRATEGIES.items()
    for name in SMALL
]


@pytest.mark.parametrize(("name", "strategy", "batch"), CASES)
def test_it_trains_on_four_ranks_as_on_one_device(
    name: str, strategy: str, batch: str, tmp_path: Path
) -> None:
    done = compile_step(import_training_graph(step(name)), tmp_path / "out", "2x2", strategy, batch)

    assert_trains_as_one_device(done, random_batches(done.plan, 3, high=20))
