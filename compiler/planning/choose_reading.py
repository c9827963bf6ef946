"""Choose what the graph's batch is, where the user does not say: one replica's, or the whole.

    per replica   where it is proven that replicas train what one device trains on all their batches
    global        elsewhere, if the batch can be divided, evenly or not: exact for every graph
    refused       if it cannot: the user must say which of the two is meant

Asked for a batch per replica, partc compiles it in any case, and tells how it departs from one device.

A constant in a loss may stand for 1 / the number of samples, and nothing in a graph tells:

    loss = 0.025 * sum(squares [8, 5])          1 / 40, so a mean; or a weight, whatever the batch

A weight of 0.01 is 1 / (batch x a whole number) for batches of 2, 4, 5, 10, 20, 25, 50 and 100, and half a
sum is its mean for a batch of 2: so the constant decides nothing, and is shown to the user, who knows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from partc.compiler.planning.check_slope import is_slope_of_loss
from partc.cost.strategy import Batch
from partc.passes.graph.facts import Facts
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.simplify import expand_casts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.replicas.judge_replicas import NO_MEAN, Departure, judge_replicas
from partc.passes.roles.find_gradients import refuse_unfound
from partc.passes.rules.sharding_rules import rule_of
from partc.runtime.errors import BadModel, UnsupportedModel
from partc.runtime.plan.program import Aggregation

MAX_NAMES = 3  # names of one sentence


@dataclass(frozen=True)
class BatchReading:
    """What the graph's batch is, and how a batch per replica departs from one device: in sentences."""

    batch: Batch
    departures: tuple[str, ...] = ()


def choose_reading(
    training: TrainingGraph,
    replicas: int,
    requested: Batch | None,
    sizes: Mapping[str, int],
    aggregation: Aggregation = Aggregation(),  # noqa: B008  # frozen
) -> BatchReading:
    """Return the reading of the batch for so many replicas. Raises UnsupportedModel.

    Needs: gradients are known.
    """
    if requested == "global" or replicas == 1:
        return BatchReading(requested or "per-replica")
    departures = judge_step(training, sizes, aggregation, replicas)
    sentences = describe_departures(departures)
    extreme = next((departure for departure in departures if departure.is_extreme), None)
    if requested == "per-replica" and extreme is not None:
        raise _no_average(extreme)
    needs_replicas = training.shard_inputs or not (aggregation.average_dense and aggregation.average_sparse)
    if requested is not None or needs_replicas or all(departure.of == "output" for departure in departures):
        refuse_unfound(training, [departure.name for departure in departures if departure.of == "variable"])
        return BatchReading("per-replica", sentences)
    if not _indivisible(training, sizes, replicas):
        return BatchReading("global", sentences)
    raise _refuse(training, sizes, replicas, sentences)


def _no_average(departure: Departure) -> UnsupportedModel:
    return UnsupportedModel(
        "a largest or smallest value of the batch is kept from step to step, which replicas on batches of "
        "their own cannot average",
        at=f"next value of {departure.name!r}",
        fix="train it synchronously with --batch global, or keep this variable out of the training step",
    )


def judge_step(
    training: TrainingGraph,
    sizes: Mapping[str, int],
    aggregation: Aggregation = Aggregation(),  # noqa: B008  # frozen
    replicas: int = 2,
) -> tuple[Departure, ...]:
    """Return how replicas depart from one device, by the step's structure, and by running it once at most.

    Needs: gradients are known. `sizes`: a value for every symbolic size. `replicas`: how many, where it is
    known.
    """
    batch_sizes = batch_sizes_of(training, {name: max(size, 2) for name, size in sizes.items()})
    judged = _of_two_samples(training) if 1 in batch_sizes.values() else training
    try:
        facts = infer_facts(judged, {name: max(size, 2) for name, size in sizes.items()})
    except (BadModel, UnsupportedModel):
        if judged is training:
            raise
        why = "a batch of one does not show what becomes of a larger one"
        return tuple(Departure("gradient", name, why) for name in training.gradients)
    expand_casts(judged, facts)
    departures = judge_replicas(judged, facts, aggregation, replicas)
    gradients = [departure for departure in departures if departure.of == "gradient"]
    may_be_mean = gradients and all(departure.by_constant for departure in gradients)
    if may_be_mean and is_slope_of_loss(training, min(batch_sizes.values(), default=1)):
        return tuple(departure for departure in departures if departure.of != "gradient")
    if judged is training and _has_fixed_batch(training):
        return _with_counting_constant(departures, training, facts, min(batch_sizes.values(), default=1))
    return departures


def _has_fixed_batch(training: TrainingGraph) -> bool:
    inputs = training.data_inputs.values()
    return all(isinstance(d.shape[d.sample_axis], int) for d in inputs if d.sample_axis is not None)


def _with_counting_constant(
    departures: tuple[Departure, ...], training: TrainingGraph, facts: Facts, samples: int
) -> tuple[Departure, ...]:
    """Return departures that tell which constant of the loss may be the size of the batch."""
    constant = find_counting_constant(training, facts, samples)
    if constant is None:
        return departures
    why = f"{NO_MEAN} ({constant.describe(samples)}, and --batch per-replica is exact)"
    return tuple(
        replace(departure, why=why) if departure.why == NO_MEAN else departure for departure in departures
    )


def _of_two_samples(training: TrainingGraph) -> TrainingGraph:
    """Return the step with a batch of two instead of one: an axis of length one may be any axis."""
    graph = training.graph.copy()
    node_outputs = {tensor.name: tensor for node in graph.nodes for tensor in node.outputs}
    for tensor in node_outputs.values():
        tensor.shape = None if tensor.shape is None else [None for _ in tensor.shape]
    for tensor in graph.inputs:
        data = training.data_inputs.get(tensor.name)
        if data is not None and data.sample_axis is not None and tensor.shape[data.sample_axis] == 1:
            tensor.shape = [2 if axis == data.sample_axis else size for axis, size in enumerate(tensor.shape)]
    return replace(training, graph=graph)


def describe_departures(departures: Iterable[Departure]) -> tuple[str, ...]:
    """Return a sentence for each reason why replicas depart from one device, those of gradients first."""
    reasons: dict[str, list[Departure]] = {}
    for departure in departures:
        reasons.setdefault(departure.why, []).append(departure)
    return tuple(f"{_spell(group)}: {why}" for why, group in reasons.items())


def departures_of_training(sentences: Iterable[str]) -> tuple[str, ...]:
    """Return those sentences of describe_departures that name more than outputs."""
    return tuple(sentence for sentence in sentences if not sentence.startswith("the output"))


def are_of_outputs(sentences: Iterable[str]) -> bool:
    """Tell whether sentences of describe_departures name outputs alone: what is trained is exact."""
    return not departures_of_training(sentences)


def _spell(departures: list[Departure]) -> str:
    """Name what departs: the gradients of 12 parameters (W, b, ..), the next value of m."""
    nouns = {"gradient": ("the gradient of", "parameters"), "variable": ("the next value of", "variables")}
    parts: list[str] = []
    for of in ("gradient", "variable", "output"):
        names = [departure.name for departure in departures if departure.of == of]
        what, plural = nouns.get(of, ("the output", "outputs"))
        if len(names) > MAX_NAMES:
            parts.append(f"{what} {len(names)} {plural} ({', '.join(names[:MAX_NAMES])}, ...)")
        elif names:
            parts.append(f"{what} {', '.join(names)}")
    return " and ".join(parts)


def batch_sizes_of(training: TrainingGraph, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return how many samples every data input has."""
    lengths = {
        n: d.shape[d.sample_axis] for n, d in training.data_inputs.items() if d.sample_axis is not None
    }
    return {name: sizes[size] if isinstance(size, str) else size for name, size in lengths.items()}


def _indivisible(training: TrainingGraph, sizes: Mapping[str, int], replicas: int) -> dict[str, int]:
    """Return how many samples those data inputs have that the replicas cannot share.

    Earlier replicas take one more where the model itself tells the input's size.
    """
    fixed_size = {
        n for n, data in training.data_inputs.items() if all(isinstance(s, int) for s in data.shape)
    }
    return {
        name: size
        for name, size in batch_sizes_of(training, sizes).items()
        if size % replicas and (size < replicas or name not in fixed_size)
    }


def _refuse(
    training: TrainingGraph, sizes: Mapping[str, int], replicas: int, sentences: tuple[str, ...]
) -> UnsupportedModel:
    name, samples = next(iter(_indivisible(training, sizes, replicas).items()))
    data = training.data_inputs[name]
    length = data.shape[data.sample_axis or 0]
    multiple = -(-samples // replicas) * replicas
    enlarge = f"--size {length}={multiple}"
    if not isinstance(length, str):
        enlarge = f"a graph of batch {multiple} (`partc grad --batch-size {multiple}` makes one)"
    return UnsupportedModel(
        f"{replicas} replicas on batches of their own would not train what one device trains on all of them, "
        f"and a batch of {samples} cannot be divided among them",
        at=sentences[0],
        fix=f"give --batch global with {enlarge}, which is exact; or --batch per-replica, which averages "
        "the replicas all the same; or a loss that is a mean over samples",
    )


TOLERANCE = 1e-5  # of the constant, which may be of float32, and a product of several


@dataclass(frozen=True, slots=True)
class CountingConstant:
    """What multiplies the sum over samples that is the loss: `factor` = 1 / `count`."""

    factor: float
    count: int

    def describe(self, samples: int) -> str:
        """Return what the user may know better, as a part of a sentence."""
        return f"if {self.factor:.6g} stands for 1 / {self.count} of a batch of {samples}, it is a mean"


def find_counting_constant(training: TrainingGraph, facts: Facts, samples: int) -> CountingConstant | None:
    """Return the constants of the loss, multiplied, where they are 1 / a multiple of `samples`.

    Needs: the batch is of fixed size, and the loss a sum over its samples.
    """
    factor = 1.0
    tensor = training.graph.tensors().get(training.loss or "")
    while isinstance(tensor, gs.Variable) and tensor.inputs:
        operand = _leading_operand(tensor.inputs[0], facts)
        if operand is None:
            break
        tensor, constant = operand
        factor *= constant
    count = round(1 / factor) if factor > 0 else 0
    is_count = count > 1 and count % samples == 0 and abs(factor * count - 1) < TOLERANCE
    return CountingConstant(factor, count) if is_count else None


def _leading_operand(node: gs.Node, facts: Facts) -> tuple[gs.Tensor, float] | None:
    """Return the operand that a node's result is proportional to, and what it is multiplied with."""
    rule = rule_of(node, facts)
    if rule is None or len(rule.terms) != 1:
        return None
    factor, others = 1.0, []
    for index in rule.terms[0]:
        value = _number(node.inputs[index], facts)
        if value is None:
            others.append(index)
        elif value:
            factor *= 1 / value if index in rule.divides else value
    if len(others) != 1 or others[0] in rule.divides or others[0] not in rule.linear:
        return None
    return node.inputs[others[0]], factor


def _number(tensor: gs.Tensor, facts: Facts) -> float | None:
    """Return a constant that is one number."""
    value = tensor.values if isinstance(tensor, gs.Constant) else facts.value(tensor.name)
    return float(np.reshape(value, ())) if value is not None and np.size(value) == 1 else None
