"""Follow each node of the training graph into the plan: the segments that run it, its time and its bytes.

    node of the graph ── lowered ──> its copies, one a mesh, and helpers: what partc adds for it
    copy, helper      ── scheduled ─> a segment, which some ranks run, once or for every micro-batch

A segment's predicted time is divided among its nodes in proportion to what each would take alone, so that
the times of all nodes on a rank add up to the time that it computes in the simulated step.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from partc.compiler.compilation import Compilation
from partc.cost.cluster.cluster import Cluster
from partc.cost.simulation.roofline import work_s
from partc.passes.lowering.lowered_graph import LoweredGraph, is_communication
from partc.passes.scheduling.segment_work import WorkCounter
from partc.runtime.plan.program import Plan, Rank, Run, Site

SiteNode = tuple[Site, str]  # a site, and the path of a segment that its ranks run


@dataclass(frozen=True, slots=True)
class NodeTrace:
    """What became of a node.

    sites     whose ranks run it, in the plan's order; none: no rank does
    segments  paths in the plan's folder, in the order in which they first run
    seconds   of a step, on one rank, helpers included; of several sites on the slowest one's
    read_bytes, written_bytes  of a step, on one rank: what its own copies read and write
    helpers   how many nodes partc added for it
    """

    sites: tuple[Site, ...] = ()
    segments: tuple[str, ...] = ()
    seconds: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    helpers: int = 0


@dataclass(frozen=True)
class PlanTrace:
    """All nodes of the training graph by name, and of each segment the nodes that it runs, in order.

    `helped`: lowered node that stands for no node -> the node for which partc added it, where that is known.
    """

    nodes: Mapping[str, NodeTrace]
    segments: Mapping[str, tuple[str, ...]]
    seconds: Mapping[SiteNode, float]  # of a step, on the slowest rank
    runs: Mapping[SiteNode, int]  # a step
    helped: Mapping[str, str]


def trace_nodes(compilation: Compilation, cluster: Cluster, folder: Path) -> PlanTrace:
    """Return what became of every node. `folder` holds the plan's segments."""
    plan, lowered = compilation.plan, compilation.lowered
    runs = Counter((i.site, i.segment) for i in plan.instructions if isinstance(i, Run))
    seconds = _segment_seconds(compilation, runs)
    members = {path: _node_names(folder / path) for path in dict.fromkeys(path for _, path in runs)}
    graph = compilation.training.graph
    helped = find_helped(lowered, {t.name: node.name for node in graph.nodes for t in node.outputs})
    alone_s = _alone_seconds(compilation, cluster)
    sums: dict[str, dict[Site, _Sum]] = {}
    by_name = {node.name: node for node in lowered.nodes}
    for place, times in runs.items():
        site, path = place
        own = [name for name in members[path] if name in by_name]
        total_s = sum(alone_s.get(name, 0.0) for name in own)
        for name in own:
            owner = lowered.original.get(name) or helped.get(name)
            if owner is None:
                continue
            share = alone_s.get(name, 0.0) / total_s if total_s else 1 / len(own)
            entry = sums.setdefault(owner, {}).setdefault(site, _Sum({}, set()))
            entry.segments[path] = None
            entry.seconds += share * seconds[place]
            if name in lowered.original:
                entry.add_bytes(by_name[name], lowered, times)
            else:
                entry.helpers.add(name)
    order = {path: number for number, path in enumerate(members)}
    nodes = {node.name: _summed(sums.get(node.name, {}), order) for node in graph.nodes}
    owners = {path: _owners(names, lowered.original, helped) for path, names in members.items()}
    return PlanTrace(nodes, owners, seconds, runs, helped)


@dataclass(slots=True)
class _Sum:
    """What is found of a node at one site."""

    segments: dict[str, None]
    helpers: set[str]
    seconds: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0

    def add_bytes(self, node: gs.Node, lowered: LoweredGraph, times: int) -> None:
        """Add what a copy reads and writes in all its runs of a step."""
        for name in {tensor.name for tensor in node.inputs if tensor.name}:
            self.read_bytes += times * lowered.nbytes.get(name, 0)
        self.written_bytes += times * sum(lowered.nbytes.get(t.name, 0) for t in node.outputs)


def _summed(by_site: Mapping[Site, _Sum], order: Mapping[str, int]) -> NodeTrace:
    if not by_site:
        return NodeTrace()
    each = by_site.values()
    paths = {path for part in each for path in part.segments}
    return NodeTrace(
        tuple(by_site),
        tuple(sorted(paths, key=order.__getitem__)),
        max(part.seconds for part in each),
        max(part.read_bytes for part in each),
        max(part.written_bytes for part in each),
        max(len(part.helpers) for part in each),
    )


def _owners(names: Iterable[str], original: Mapping[str, str], helped: Mapping[str, str]) -> tuple[str, ...]:
    owners = (original.get(name) or helped.get(name) for name in names)
    return tuple(dict.fromkeys(name for name in owners if name is not None))


def _node_names(path: Path) -> tuple[str, ...]:
    return tuple(node.name for node in onnx.load(path, load_external_data=False).graph.node)


def _segment_seconds(compilation: Compilation, runs: Mapping[SiteNode, int]) -> dict[SiteNode, float]:
    """Return how long the runs of each segment take together, on the slowest of its ranks."""
    plan = compilation.plan
    each_s = {place: np.zeros(len(plan.ranks)) for place in runs}
    for bars in compilation.timeline.bars:
        run = plan.instructions[bars.instruction]
        if isinstance(run, Run):
            each_s[run.site, run.segment][bars.ranks] += bars.stop_s - bars.start_s
    return {place: float(seconds.max()) for place, seconds in each_s.items()}


def _alone_seconds(compilation: Compilation, cluster: Cluster) -> dict[str, float]:
    """Return lowered node -> what it would take alone, on a rank of its site."""
    lowered = compilation.lowered
    counter = WorkCounter(lowered, len(cluster.hosts))
    rank_of = _rank_of_sites(compilation.plan)
    seconds_of: dict[str, float] = {}
    for node in lowered.nodes:
        if is_communication(node):
            counter.pass_on([node])
            continue
        rank = rank_of.get(lowered.site_of[node.name])
        work = counter.count([node], {tensor.name for tensor in node.outputs})
        if rank is not None:
            seconds_of[node.name] = work_s(work, rank, cluster, compilation.options.times)
    return seconds_of


def _rank_of_sites(plan: Plan) -> dict[Site, Rank]:
    ranks: dict[Site, Rank] = {}
    for rank in plan.ranks:
        for site in rank.sites:
            ranks.setdefault(site, rank)
    return ranks


def find_helped(lowered: LoweredGraph, made_by: Mapping[str, str]) -> dict[str, str]:
    """Return for what stands for no node, communications too, the node for which it is there.

    It is the node whose result it makes or moves, else the one that reads it first. `made_by`: tensor of the
    training graph -> the node that makes it.
    """
    owner_of: dict[str, str] = {}  # value -> the node whose copy, or helper, reads it first
    owners: dict[str, str] = {}
    for node in reversed(lowered.nodes):
        owner = lowered.original.get(node.name)
        if owner is None:
            meanings = (lowered.meanings.get(tensor.name, ("", None))[0] for tensor in node.outputs)
            makers = (made_by[meaning] for meaning in meanings if meaning in made_by)
            readers = (owner_of[tensor.name] for tensor in node.outputs if tensor.name in owner_of)
            owner = next(chain(makers, readers), None)
            if owner is None:
                continue
            owners[node.name] = owner
        owner_of.update((tensor.name, owner) for tensor in node.inputs if tensor.name)
    return owners
