"""What layouts are said to send along shared weights is what plans send."""

from itertools import product
from pathlib import Path

import pytest

from partc.compiler.compilation import Compilation
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import ANALYSE, CHOICE, LOWERING, OUTLINE, run
from partc.compiler.settle_options import begin_compilation
from partc.cost.cluster.cluster import read_cluster
from partc.models.catalogue import build_model
from partc.passes.configure import configure
from partc.passes.distribute import lay_out
from partc.passes.search.named.weight_layouts import sent_along
from partc.runtime.plan.program import Start
from tests.sampling import sampled

CLUSTER = read_cluster(Path(__file__).parents[3] / "examples" / "cluster-1x4.json")
# An AllReduce scatters and gathers; who exchanges keeps a part, which is counted as sent.
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "exchange": 1}
WITHIN = 0.15  # gradients of what is scattered are counted, though they are parts already: an eighth of moe
WORDS = {"batch": 24, "vocab": 256, "embedding": 64, "cells": 64, "steps": 10}
MODELS = {
    "rnnlm": ("loss", {**WORDS, "layers": 2}),
    "rnntc": ("softmax_cross_entropy", {**WORDS, "layers": 2, "classes": 4}),
    "moe": ("loss", {"batch": 8, "vocab": 64, "cells": 16, "steps": 4, "experts": 4, "expert_cells": 16}),
    "resnet50": ("softmax_cross_entropy", {"batch": 8, "width": 8, "image": 32, "classes": 8}),
    "alexnet": ("softmax_cross_entropy", {"batch": 8, "width": 8, "cells": 64, "image": 67, "classes": 8}),
    "mlp": ("softmax_cross_entropy", {"batch": 8}),
}


def compiled(name: str, strategy: str, folder: Path) -> Compilation:
    loss, sizes = MODELS[name]
    forward = build_model(name, **sizes)
    train = build_training_graph(forward, loss=loss, optimizer=SGD(0.1), folder=folder)
    options = Options(batch="global", strategy=strategy)
    compilation = begin_compilation(import_training_graph(train), CLUSTER, options)
    run((*ANALYSE, CHOICE, LOWERING, OUTLINE), compilation)
    return compilation


EACH_ONCE = [2 * number + number % 2 for number in range(len(MODELS))]


@pytest.mark.parametrize(("name", "parts"), sampled(product(MODELS, (2, 4)), EACH_ONCE))
def test_what_layouts_send_is_what_the_plan_sends(name: str, parts: int, tmp_path: Path) -> None:
    compilation = compiled(name, f"tensor={parts},workers={parts}", tmp_path)
    analysis = compilation.analysis

    graph = lay_out(analysis, {}, configure(analysis, compilation.strategy))
    sent = sent_along(graph, analysis.order, axis=1)

    expected = sum(times * analysis.facts.nbytes(tensor) for tensor, times in sent.items())
    starts = [start for start in compilation.plan.instructions if isinstance(start, Start)]
    planned = sum(PASSES[start.kind] * start.payload_bytes for start in starts)
    assert expected == pytest.approx(planned, rel=WITHIN)
    assert planned > 0
