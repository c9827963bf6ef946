"""Pipelines of a step: names are some of them, they train as one device, and climbs find the quickest."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise
from math import inf
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.api import compile_step
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.search.pipelines.climb_pipelines import PipelineClimb
from partc.compiler.search.pipelines.estimate_pipelines import PipelineEstimate
from partc.compiler.search.pipelines.step_pipelines import StepPipelines
from partc.compiler.search.whole_steps import WholeSteps
from partc.compiler.verification.verify import launch_in_process, verify
from partc.passes.search.stages.pipeline_space import Pipeline
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import cluster_of, random_batches
from tests.sampling import sampled

WIDTHS = (256, 1024, 64, 512, 512, 32, 768)  # of six layers, none of which takes as long as another
BATCH = 4
NAMES = ("data=4", "fsdp", "tensor=4", "tensor=2,fsdp", "pipeline=2", "pipeline=4,microbatches=2")
MORE_NAMES = ("pipeline=2,tensor=2", "pipeline=2,fsdp=2,microbatches=2", "tensor=4,microbatches=2")


@cache
def uneven_mlp() -> onnx.ModelProto:
    """Return a step of six layers, whose loss is the sum of the squares of what they make."""
    layers = "\n".join(f"h{n + 1} = MatMul (h{n}, W{n})" for n in range(len(WIDTHS) - 1))
    last = f"h{len(WIDTHS) - 1}"
    forward = parse(
        f"forward (double[{BATCH},{WIDTHS[0]}] h0) => (double loss) "
        f"{{ {layers}\n loss = ReduceSumSquare <keepdims = 0> ({last}) }}"
    )
    rng = np.random.default_rng(0)
    for n, shape in enumerate(pairwise(WIDTHS)):
        weight = rng.normal(size=shape) / np.sqrt(shape[0])
        forward.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"W{n}"))
    return build_training_graph(forward, loss="loss", optimizer=Adam(0.01))


class Priced:
    """The pipelines of the step on a cluster, by their whole plans; each is priced once."""

    def __init__(self, cluster: str) -> None:
        options = Options(batch="global")
        self.whole = WholeSteps(lambda: import_training_graph(uneven_mlp()), cluster_of(cluster), options)
        self.whole("auto", "auto")
        assert self.whole.first is not None
        self.pipelines = StepPipelines(self.whole.first)
        self.estimate = PipelineEstimate(self.pipelines)
        self._known: dict[Pipeline, float] = {}

    def price_s(self, pipeline: Pipeline) -> float:
        if pipeline not in self._known:
            priced = self.whole("", self.pipelines.strategy(pipeline))
            self._known[pipeline] = inf if priced is None else priced.step_s
        return self._known[pipeline]

    def all(self) -> Iterator[Pipeline]:
        """Yield every pipeline, counted out here and not by the space."""
        workers, places = len(self.pipelines.first.worker_names), len(self.pipelines.line.nodes)
        for stages in (n for n in range(1, workers + 1) if workers % n == 0):
            for data in (n for n in range(1, workers // stages + 1) if workers // stages % n == 0):
                for starts in combinations(range(1, places), stages - 1):
                    for count in (n for n in range(1, BATCH // data + 1) if BATCH // data % n == 0):
                        for shares in (False, True)[: 1 + (data > 1)]:
                            yield Pipeline(data, workers // stages // data, starts, count, shares)


@cache
def priced_on(cluster: str) -> Priced:
    return Priced(cluster)


@pytest.mark.parametrize("name", NAMES + MORE_NAMES)
def test_a_name_is_read_as_the_pipeline_that_is_written_as_the_name(name: str) -> None:
    on = priced_on("2x2")
    named = on.whole(name, name)
    assert named is not None

    pipeline = on.pipelines.read(named.strategy)

    assert pipeline is not None
    assert on.price_s(pipeline) == named.step_s
    assert on.pipelines.strategy(pipeline).ops == named.strategy.ops


@pytest.mark.parametrize("name", ["one-weird-trick", "layerwise"])
def test_other_names_are_no_pipelines(name: str) -> None:
    on = priced_on("2x2")
    named = on.whole(name, name)
    assert named is not None

    assert on.pipelines.read(named.strategy) is None


@pytest.mark.parametrize(("cluster", "most"), sampled([("2x1", 8), ("1x2", 8), ("2x2", 20)], range(1)))
def test_a_climb_finds_the_quickest_of_all_cuts_microbatches_and_grids(cluster: str, most: int) -> None:
    on = priced_on(cluster)
    start = Pipeline(len(on.pipelines.first.worker_names))
    climb = PipelineClimb(on.pipelines.space, on.price_s, on.estimate.step_s, lambda count: count < most)

    climb.run([start], np.random.default_rng(0))

    every = {pipeline: on.price_s(pipeline) for pipeline in on.all()}
    assert climb.priced <= most < len(every) / 3
    assert min(climb.prices.values()) == min(every.values())


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(1, 1, (1, 3, 5), 4),
        Pipeline(2, 1, (2,), 2, shares=True),
        Pipeline(1, 2, (4,), 4),
        Pipeline(2, 2, (), 2),
    ],
)
def test_pipelines_train_as_one_device(pipeline: Pipeline, tmp_path: Path) -> None:
    on = priced_on("2x2")
    options = Options(batch="global", strategy=on.pipelines.strategy(pipeline))

    compiled = compile_step(uneven_mlp(), cluster_of("2x2"), tmp_path / "out", options)

    assert compiled.timeline.step_s == on.price_s(pipeline)
    batches = random_batches(compiled.plan, 2)
    report = verify(tmp_path / "out", steps=2, data=batches, launcher=launch_in_process)
    assert {check.verdict for check in report.variables} == {"equal"}


def test_the_estimate_ranks_cuts_and_microbatches_much_as_plans_do() -> None:
    on = priced_on("2x1")
    pipelines = [pipeline for pipeline in on.all() if pipeline.stages == 2]

    times = [(on.estimate.step_s(pipeline), on.price_s(pipeline)) for pipeline in pipelines]

    ranks = [np.argsort(np.argsort(column)) for column in zip(*times, strict=True)]
    assert np.corrcoef(ranks)[0, 1] > 0.9


def test_words_tell_what_changes() -> None:
    pipelines = priced_on("2x2").pipelines
    before = Pipeline(2, 1, (2,), 4)

    assert pipelines.describe(before, None).startswith("stages=2, data=2, microbatches=4, stage 1 from ")
    assert pipelines.describe(Pipeline(2, 1, (2,), 8, shares=True), before) == "microbatches=8, fsdp"
    assert pipelines.describe(Pipeline(2, 1, (3,), 4), before).startswith("stage 1 from ")
    assert pipelines.describe(Pipeline(4), before) == "stages=1, data=4, microbatches=1"
