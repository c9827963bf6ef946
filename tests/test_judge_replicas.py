"""What is proven of replicas, held against the graph itself on the whole batch in plain onnxruntime."""

from collections.abc import Mapping

import numpy as np
import onnx
import pytest

from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.training.build import build_training_graph
from partc.compiler.training.optimizers import SGD
from partc.passes.analysis.facts import infer_facts
from partc.passes.replicas.judge_replicas import Departure, judge_replicas
from partc.runtime.errors import PartcError
from partc.runtime.program import Aggregation
from tests.random_losses import DATA, random_batch, random_loss
from tests.training_steps import Arrays, facts_of, initial_variables, session

REPLICAS, SAMPLES = 3, 4
SUMS = Aggregation(average_dense=False, average_sparse=False)


def judged(step: onnx.ModelProto, aggregation: Aggregation = Aggregation()) -> tuple[Departure, ...]:
    training = import_training_graph(step, sample_axes=dict.fromkeys(DATA, 0))
    facts = infer_facts(training, {"n": SAMPLES})
    return tuple(d for d in judge_replicas(training, facts, aggregation) if d.of != "output")


def gradients(step: onnx.ModelProto, batch: Mapping[str, np.ndarray]) -> Arrays:
    """Run a step of SGD with rate 1: what it takes off is the gradient."""
    state, variables = facts_of(step)["state"], initial_variables(step)
    ready = session(step)
    fed = {info.name for info in ready.get_inputs()}
    feeds = {name: value for name, value in (variables | dict(batch)).items() if name in fed}
    following = ready.run(list(state.values()), feeds)
    return {name: variables[name] - new for name, new in zip(state, following, strict=True)}


def differs(step: onnx.ModelProto, seed: int, divisor: int) -> float:
    """Return by how much the replicas' gradients, summed and divided, miss the whole batch's."""
    whole = random_batch(np.random.default_rng(seed), REPLICAS * SAMPLES)
    parts = []
    for replica in range(REPLICAS):
        share = {name: np.split(value, REPLICAS)[replica] for name, value in whole.items()}
        parts.append(gradients(step, share))
    wanted = gradients(step, whole)
    largest = max(float(np.max(np.abs(gradient))) for gradient in wanted.values())
    met = {name: np.sum([part[name] for part in parts], axis=0) / divisor for name in wanted}
    return max(float(np.max(np.abs(met[name] - wanted[name]))) for name in wanted) / max(largest, 1e-12)


def step_of(seed: int) -> onnx.ModelProto | None:
    """Return a training step of a random loss; None where partc cannot differentiate it."""
    forward = random_loss(seed)
    try:
        return build_training_graph(forward, loss=forward.graph.output[0].name, optimizer=SGD(1.0))
    except PartcError:
        return None
