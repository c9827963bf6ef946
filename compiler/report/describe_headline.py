"""The first thing a reader sees: what was compiled for what, and how it is expected to do."""

from collections import Counter
from dataclasses import dataclass

from partc.compiler.compilation import Compilation
from partc.compiler.report.choices.describe_mesh import describe_grid
from partc.compiler.report.describe_program import is_idle, is_server
from partc.compiler.report.measure_traffic import StepTraffic
from partc.compiler.report.units import count, join_words, plural, seconds, size
from partc.cost.assignment.synchronisation import Choice
from partc.cost.cluster.cluster import Cluster
from partc.runtime.plan.program import Aggregation, Plan, rounding_of
from partc.runtime.plan.variables import DataInput


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its name and a remark."""

    name: str
    value: str
    remark: str


@dataclass(frozen=True, slots=True)
class Headline:
    """The top of the page."""

    model: str
    cluster: str
    machines: str
    batch: str
    strategy: str
    figures: tuple[Figure, ...]


def describe_headline(
    compilation: Compilation, cluster: Cluster, model: str, traffic: StepTraffic
) -> Headline:
    """Return the headline; `model` is the graph's name."""
    return Headline(
        model=model,
        cluster=cluster.name,
        machines=_machines(compilation.cluster),
        batch=_rounding(compilation.plan) + _batch(compilation.plan),
        strategy=_of_mesh(compilation)
        if compilation.strategy.has_meshes
        else _strategy(compilation.costs.choices),
        figures=_figures(compilation, traffic),
    )


def _machines(cluster: Cluster) -> str:
    profiles = Counter(device.profile for host in cluster.hosts for device in host.devices)
    counted = [f"{count(number)}\u00a0×\u00a0{profile}" for profile, number in sorted(profiles.items())]
    devices = join_words(counted)
    return f"{plural(len(cluster.hosts), 'host')}, {devices}"


def _rounding(plan: Plan) -> str:
    """Say what is not the single device's, if gradients are rounded."""
    rounding = rounding_of(plan)
    if not rounding:
        return ""
    return (
        f"Dense gradients are rounded to {rounding} before they are sent, and summed in float32: "
        "the result is near the single device’s, and not equal. "
    )


def _batch(plan: Plan) -> str:
    if plan.asynchronous:
        return (
            f"Asynchronous: {plural(len(plan.asynchronous), 'worker')} train on samples of their own and "
            "wait for nobody, so the result is not the single device’s. Every push is applied once, and "
            "by all servers or by none; what a worker computes with may be older, by no "
            "more steps than the option \u2011\u2011staleness allows. What follows is one worker’s session "
            "with all servers."
        )
    if plan.batch == "global":
        return (
            "The graph’s batch is the whole batch: it is split over the workers, "
            "and the result is the single device’s."
            + (" Batches per replica would train something else." if plan.departures else "")
        )
    return (
        "The graph’s batch is one replica’s: every worker runs it on samples of its own, "
        f"{_joining(plan.aggregation)}, and every variable is updated once."
        + (
            " This is not what one device makes of all samples: see the assumptions."
            if plan.departures
            else ""
        )
    )


def _joining(aggregation: Aggregation) -> str:
    """Say how the replicas' gradients become one."""
    match aggregation.average_dense, aggregation.average_sparse:
        case True, True:
            return "the gradients are averaged"
        case False, False:
            return "the gradients are summed, not averaged"
        case True, False:
            return "dense gradients are averaged, sparse ones summed"
        case _:
            return "sparse gradients are averaged, dense ones summed"


def _of_mesh(compilation: Compilation) -> str:
    grid = describe_grid(compilation.strategy, compilation.lowered.meshes, " \u00d7 ")
    choices = compilation.costs.choices
    amount = size(sum(choice.bytes for choice in choices))
    parted = sum(choice.variable in compilation.strategy.variables for choice in choices)
    kinds = join_words(_kinds(list(choices))) or "no parameter"
    if parted:
        storage = f"{parted} of them kept in parts"
    else:
        storage = "each whole in one stage" if compilation.strategy.stages > 1 else "each kept whole"
    return f"{kinds} ({amount}), {storage}, on a mesh of {grid}."


def _strategy(choices: tuple[Choice, ...]) -> str:
    parts: list[str] = []
    for method, ending in (
        ("servers", "on servers"),
        ("all_reduce", "summed by AllReduce"),
        ("all_gather", "exchanged by AllGatherv"),
    ):
        matching = [choice for choice in choices if choice.method == method]
        if matching:
            amount = size(sum(choice.bytes for choice in matching))
            kinds = join_words(_kinds(matching))
            parts.append(f"{kinds} ({amount}) {ending}")
    return f"{join_words(parts)}." if parts else "No parameter is trained."


def _kinds(choices: list[Choice]) -> list[str]:
    sparse = sum(choice.sparse for choice in choices)
    numbers = ((sparse, "sparse parameter"), (len(choices) - sparse, "dense parameter"))
    return [plural(number, noun) for number, noun in numbers if number]


def _figures(compilation: Compilation, traffic: StepTraffic) -> tuple[Figure, ...]:
    plan = compilation.plan
    step_s = compilation.timeline.step_s
    sent = [sent for _, sent in traffic.hosts.values()]
    parameters = sum(choice.bytes for choice in compilation.costs.choices)
    servers = sum(is_server(plan, rank) for rank in plan.ranks)
    idle = sum(is_idle(plan, rank) for rank in plan.ranks)
    samples = samples_per_step(plan)
    speed = f"{count(samples / step_s)} samples/s" if samples and step_s else "samples per step unknown"
    return (
        Figure("Predicted step", seconds(step_s), speed),
        Figure(
            "Between hosts, per step", size(sum(sent)), f"sent in all, {size(max(sent))} by the busiest host"
        ),
        Figure("Trained parameters", size(parameters), plural(len(compilation.costs.choices), "parameter")),
        Figure(
            "Ranks",
            count(len(plan.ranks)),
            f"{_workers(plan)}, {plural(servers, 'server') if servers else 'no server'}"
            + (f", {idle} with nothing to do" if idle else "")
            + (" in one session" if plan.asynchronous else ""),
        ),
    )


def _workers(plan: Plan) -> str:
    workers = sum(rank.replica is not None and not is_idle(plan, rank) for rank in plan.ranks)
    if workers == plan.replicas:
        return plural(workers, "worker")
    return f"{plural(plan.replicas, 'replica')} on {plural(workers, 'worker')}"


def samples_per_step(plan: Plan) -> int | None:
    """Return the samples of all replicas together, None where the graph does not tell."""
    sizes = {_samples(item, plan.sizes) for item in plan.data_inputs if item.sample_axis is not None}
    if len(sizes) != 1 or (samples := sizes.pop()) is None:
        return None
    return samples * (1 if plan.batch == "global" else plan.replicas)


def _samples(item: DataInput, assumed: dict[str, int]) -> int | None:
    if item.sample_axis is None:
        return None
    length = item.shape[item.sample_axis]
    return assumed.get(length) if isinstance(length, str) else length
