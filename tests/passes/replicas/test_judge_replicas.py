"""What is proven of replicas, held against the graph itself on the whole batch in plain onnxruntime."""

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.replicas.judge_replicas import judge_replicas
from partc.runtime.errors import PartcError
from partc.runtime.plan.program import Aggregation
from tests.builders.graphs.random_losses import DATA, random_batch, random_loss
from tests.checks.training_steps import Arrays, facts_of, initial_variables, session

REPLICAS, SAMPLES = 3, 4
EQUAL = 1e-9
SUMS = Aggregation(average_dense=False, average_sparse=False)


def are_proven(step: onnx.ModelProto) -> tuple[bool, bool]:
    """Tell what is proven of the replicas' gradients: that their mean, that their sum is the whole's."""
    training = import_training_graph(step, GraphOptions(sample_axes=dict.fromkeys(DATA, 0)))
    facts = infer_facts(training, {"n": SAMPLES})
    mean, total = (
        all(departure.of == "output" for departure in judge_replicas(training, facts, aggregation))
        for aggregation in (Aggregation(), SUMS)
    )
    return mean, total


class OneDevice:
    """A step of SGD with rate 1 in plain onnxruntime: what it takes off the variables is the gradient."""

    def __init__(self, step: onnx.ModelProto) -> None:
        self.state, self.variables = facts_of(step)["state"], initial_variables(step)
        self.session = session(step)
        self.reads = {info.name for info in self.session.get_inputs()}

    def gradients(self, batch: Arrays) -> Arrays:
        feeds = {name: value for name, value in (self.variables | batch).items() if name in self.reads}
        following = self.session.run(list(self.state.values()), feeds)
        pairs = zip(self.state, following, strict=True)
        return {name: self.variables[name] - new for name, new in pairs}

    def misses(self, seed: int) -> tuple[float, float]:
        """Return by how much the mean, and the sum, of the replicas' gradients miss the whole batch's."""
        batch = random_batch(np.random.default_rng(seed), REPLICAS * SAMPLES)
        whole = self.gradients(batch)
        parts = [
            self.gradients({name: np.split(value, REPLICAS)[replica] for name, value in batch.items()})
            for replica in range(REPLICAS)
        ]
        total = {name: np.sum([part[name] for part in parts], axis=0) for name in whole}
        largest = max(float(np.max(np.abs(gradient))) for gradient in whole.values())

        def miss(divisor: int) -> float:
            worst = max(float(np.max(np.abs(total[name] / divisor - whole[name]))) for name in whole)
            return worst / max(largest, 1e-12)

        return miss(REPLICAS), miss(1)


def step_of(seed: int) -> onnx.ModelProto | None:
    """Return a training step of a random loss; None where partc cannot differentiate it."""
    forward = random_loss(seed)
    try:
        return build_training_graph(forward, loss=forward.graph.output[0].name, optimizer=SGD(1.0))
    except PartcError:
        return None


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_what_is_proven_is_so_and_what_is_so_is_proven(first: int) -> None:
    """Random losses: the mean (the sum) of the replicas' gradients is the whole batch's, or partc says no."""
    proven = 0
    for seed in range(first, first + 10):
        step = step_of(seed)
        if step is not None:
            device = OneDevice(step)
            is_equal = np.max([device.misses(draw) for draw in (1, 2)], axis=0) < EQUAL
            assert are_proven(step) == tuple(is_equal), seed
            proven += np.count_nonzero(is_equal)
    assert proven >= 2


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 2000, 100))
def test_of_a_thousand_losses_nothing_is_proven_that_is_not_so(first: int) -> None:
    for seed in range(first, first + 100):
        step = step_of(seed)
        if step is not None and any(proven := are_proven(step)):
            misses = np.max([OneDevice(step).misses(draw) for draw in (1, 2, 3)], axis=0)
            assert np.all((misses < EQUAL) | ~np.array(proven)), (seed, proven, misses)
