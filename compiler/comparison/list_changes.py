"""What `--what-if` prices, the most useful first: one thing is changed at a time.

How much of it is priced depends on the graph and the cluster alone, never on the clock, so that compiling
twice gives the same files.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, zip_longest

from partc.compiler.options import Options
from partc.compiler.report.units import plural
from partc.compiler.search.whole_steps import names_for
from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.profiles import PROFILES
from partc.cost.cluster.vary_cluster import (
    with_hosts,
    with_latencies,
    with_link_rates,
    with_profile,
    with_threads,
)
from partc.cost.what_if import Dimension
from partc.passes.graph.training_graph import TrainingGraph

FACTORS = (0.1, 10.0, 0.5, 2.0)
SIMPLE = ("allreduce", "ps", "hybrid")
MOST_NAMES = 8


CompilerInput = tuple[Cluster, Options]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a compilation's input. `keeps_plan`: the plan as it is can be played with it.

    `apply` returns the changed input; it raises what compiling raises where that cannot be.
    `reason`: why it cannot be priced at all.
    """

    dimension: Dimension
    value: str
    meaning: str
    apply: Callable[[Cluster, Options], CompilerInput]
    keeps_plan: bool = False
    reason: str = ""


def list_changes(cluster: Cluster, options: Options, graph: TrainingGraph) -> list[Change]:
    """Return the changes, of each dimension one by turns."""
    dimensions = (
        _links(cluster),
        _strategies(cluster),
        _hosts(cluster),
        _devices(cluster),
        _batches(options, graph),
    )
    turns = zip_longest(*dimensions, _latencies(cluster))
    return [change for turn in turns for change in turn if change is not None]


def _unchanged(cluster: Cluster, options: Options) -> CompilerInput:
    return cluster, options


def _with_cluster(change: Callable[[Cluster], Cluster], cluster: Cluster, options: Options) -> CompilerInput:
    return change(cluster), options


def _with_strategy(name: str, cluster: Cluster, options: Options) -> CompilerInput:
    return cluster, replace(options, strategy=name)


def _with_sizes(sizes: Mapping[str, int], cluster: Cluster, options: Options) -> CompilerInput:
    return cluster, replace(options, sizes={**options.sizes, **sizes})


def _of_cluster(
    dimension: Dimension,
    value: str,
    meaning: str,
    change: Callable[[Cluster], Cluster],
    keeps_plan: bool = True,
) -> Change:
    return Change(dimension, value, meaning, partial(_with_cluster, change), keeps_plan=keeps_plan)


def _impossible(dimension: Dimension, value: str, reason: str) -> Change:
    return Change(dimension, value, "", _unchanged, reason=reason)


def _links(cluster: Cluster) -> Iterator[Change]:
    if not cluster.links:
        yield _impossible("links", "", "the cluster has no links: its devices meet in their host's memory")
        return
    for factor in FACTORS:
        yield _of_cluster(
            "links",
            f"x{factor:g}",
            f"every link at {factor:g} times its rate",
            partial(with_link_rates, factor=factor),
        )


def _latencies(cluster: Cluster) -> Iterator[Change]:
    if not any(link.latency_s for link in cluster.links):
        yield _impossible("latency", "", "no link has a latency")
        return
    for factor in (10.0, 0.1):
        yield _of_cluster(
            "latency",
            f"x{factor:g}",
            f"every link with {factor:g} times its latency",
            partial(with_latencies, factor=factor),
        )


def _devices(cluster: Cluster) -> Iterator[Change]:
    profiles = {device.profile for host in cluster.hosts for device in host.devices if device.kind == "gpu"}
    if not profiles:
        for factor in (2, 4):
            yield _of_cluster(
                "devices",
                f"x{factor}",
                f"every CPU with {factor} times its threads, on as many times the cores",
                partial(with_threads, factor=factor),
                keeps_plan=False,
            )
        return
    for profile in _other_profiles(max(profiles, key=_speed)):
        yield _of_cluster(
            "devices",
            profile,
            f"every GPU of the profile {profile}",
            partial(with_profile, profile=profile),
        )


def _other_profiles(present: str) -> list[str]:
    """Return the next quicker kinds of GPU, and the next slower one."""
    gpus = sorted((name for name in PROFILES if name != "cpu-core"), key=_speed)
    at = gpus.index(present)
    return [*gpus[at + 1 : at + 3], *gpus[max(0, at - 1) : at]]


def _speed(profile: str) -> float:
    return PROFILES[profile].matmul_flops_per_s


def _hosts(cluster: Cluster) -> Iterator[Change]:
    now = len(cluster.hosts)
    for count in dict.fromkeys((2 * now, now // 2, 4 * now, 1)):
        if count in (0, now):
            continue
        meaning = (
            f"the first {plural(count, 'host')}" if count < now else f"{count} hosts, the last one repeated"
        )
        yield _of_cluster(
            "hosts",
            str(count),
            meaning,
            partial(with_hosts, count=count),
            keeps_plan=False,
        )


def _strategies(cluster: Cluster) -> Iterator[Change]:
    hosts = [host.name for host in cluster.hosts for _ in host.devices]
    for name in (*SIMPLE, *islice(names_for(hosts), MOST_NAMES)):
        yield Change(
            "strategy",
            name,
            f"--strategy {name}",
            partial(_with_strategy, name),
        )


def batch_sizes(options: Options, graph: TrainingGraph) -> dict[str, int]:
    """Return the symbolic sizes that are of samples, with their values: mostly one."""
    sizes = {
        size
        for data in graph.data_inputs.values()
        if data.sample_axis is not None and isinstance(size := data.shape[data.sample_axis], str)
    }
    return {name: options.sizes[name] for name in sorted(sizes) if name in options.sizes}


def _batches(options: Options, graph: TrainingGraph) -> Iterator[Change]:
    sizes_known = batch_sizes(options, graph)
    if not sizes_known:
        yield _impossible(
            "batch",
            "",
            "the graph's batch is a number; `partc grad --batch-size dynamic` makes one that can be changed",
        )
        return
    for factor in (2.0, 0.5, 4.0):
        changed = {name: int(size * factor) for name, size in sizes_known.items()}
        if min(changed.values()):
            sizes_text = ", ".join(f"{name}={size}" for name, size in changed.items())
            yield Change(
                "batch",
                sizes_text,
                f"--size {sizes_text}",
                partial(_with_sizes, changed),
            )
