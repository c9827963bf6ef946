"""Choose what the graph's batch is, where the user does not say: one replica's, or the whole.

    per replica   where it is proven that replicas train what one device trains on all their batches
    global        elsewhere, if the batch can be divided: exact for every graph
    refused       if it cannot: the user must say which of the two is meant

Asked for a batch per replica, partc compiles it in any case, and tells how it departs from one device.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from partc.compiler.check_slope import is_slope_of_loss
from partc.cost.strategy import Batch
from partc.passes.analysis.facts import Facts, infer_facts
from partc.passes.replicas.judge_replicas import Departure, judge_replicas
from partc.passes.spell_casts import spell_casts
from partc.passes.training_graph import TrainingGraph
from partc.runtime.errors import UnsupportedModel
from partc.runtime.program import Aggregation

SHOWN = 3  # names of one sentence


@dataclass(frozen=True)
class Reading:
    """What the graph's batch is, and how a batch per replica departs from one device: in sentences."""

    batch: Batch
    departures: tuple[str, ...] = ()


def choose_reading(
    training: TrainingGraph,
    replicas: int,
    asked: Batch | None,
    sizes: Mapping[str, int],
    aggregation: Aggregation = Aggregation(),  # noqa: B008  # frozen
) -> Reading:
    """Return the reading of the batch for so many replicas. Raises UnsupportedModel.

    Needs: gradients are known.
    """
    if asked == "global" or replicas == 1:
        return Reading(asked or "per-replica")
    facts = infer_facts(training, sizes)
    departures = judge_step(training, facts, aggregation)
    told = describe_departures(departures)
    extreme = next((departure for departure in departures if departure.is_extreme), None)
    if asked == "per-replica" and extreme is not None:
        raise _no_average(extreme)
    needs_replicas = training.shard_inputs or not (aggregation.average_dense and aggregation.average_sparse)
    if asked is not None or needs_replicas or all(departure.of == "output" for departure in departures):
        return Reading("per-replica", told)
    if all(size % replicas == 0 for size in _batch_sizes(training, facts).values()):
        return Reading("global", told)
    raise _refuse(training, facts, replicas, next(d for d in departures if d.of != "output"), told)


def _no_average(departure: Departure) -> UnsupportedModel:
    return UnsupportedModel(
        "a largest or smallest value of the batch is kept from step to step, which replicas on batches of "
        "their own cannot average",
        at=f"next value of {departure.name!r}",
        fix="compile with --batch global, or keep this variable out of the training step",
    )


def judge_step(
    training: TrainingGraph,
    facts: Facts,
    aggregation: Aggregation = Aggregation(),  # noqa: B008  # frozen
) -> tuple[Departure, ...]:
    """Return how replicas depart from one device, by the step's structure, and by running it once at most."""
    spell_casts(training, facts)
    departures = judge_replicas(training, facts, aggregation)
    gradients = [departure for departure in departures if departure.of == "gradient"]
    if gradients and all(departure.by_constant for departure in gradients) and is_slope_of_loss(training):
        return tuple(departure for departure in departures if departure.of != "gradient")
    return departures


def describe_departures(departures: Iterable[Departure]) -> tuple[str, ...]:
    """Return a sentence for each reason why replicas depart from one device, those of gradients first."""
    reasons: dict[str, list[Departure]] = {}
    for departure in departures:
        reasons.setdefault(departure.why, []).append(departure)
    return tuple(f"{_spell(met)}: {why}" for why, met in reasons.items())


def _spell(departures: list[Departure]) -> str:
    """Name what departs: the gradients of 12 parameters (W, b, ..), the next value of m."""
    nouns = {"gradient": ("the gradient of", "parameters"), "variable": ("the next value of", "variables")}
    parts: list[str] = []
    for of in ("gradient", "variable", "output"):
        names = [departure.name for departure in departures if departure.of == of]
        what, plural = nouns.get(of, ("the output", "outputs"))
        if len(names) > SHOWN:
            parts.append(f"{what} {len(names)} {plural} ({', '.join(names[:SHOWN])}, ...)")
        elif names:
            parts.append(f"{what} {', '.join(names)}")
    return " and ".join(parts)


def _batch_sizes(training: TrainingGraph, facts: Facts) -> dict[str, int]:
    inputs = training.data_inputs.items()
    return {name: facts.shape(name)[d.sample_axis] for name, d in inputs if d.sample_axis is not None}


def _refuse(
    training: TrainingGraph, facts: Facts, replicas: int, departure: Departure, told: tuple[str, ...]
) -> UnsupportedModel:
    sizes = _batch_sizes(training, facts)
    name = next(name for name, size in sizes.items() if size % replicas)
    shape = training.data_inputs[name].shape
    axis = training.data_inputs[name].sample_axis or 0
    multiple = -(-sizes[name] // replicas) * replicas
    enlarge = (
        f"--size {shape[axis]}={multiple}" if isinstance(shape[axis], str) else f"a graph of batch {multiple}"
    )
    return UnsupportedModel(
        f"{replicas} replicas on batches of their own would not train what one device trains on all of them, "
        f"and a batch of {sizes[name]} cannot be divided among them",
        at=told[0],
        fix=f"give --batch global with {enlarge}, which is exact; or --batch per-replica, which averages "
        "the replicas all the same; or a loss that is a mean over samples",
    )
