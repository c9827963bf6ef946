"""Say in a segment's file what it is, so that a viewer such as Netron shows it.

    segments/03-worker-forward.onnx     the third segment in the order of the step, of all workers

A name has what most of the nodes are for: forward, backward, post-aggregation (between summed gradients and
updates), update. Nodes that stand for none of the user's graph, between two communications, are named by
what they do to rows and parts: unique-ids, sum, lookup, average, copy, arrange.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version

import msgspec
import onnx

from partc.passes.analysis import Analysis
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.schedule import Chunk
from partc.passes.search.operators.forward_nodes import forward_nodes
from partc.runtime.plan.device_index import index_ranges
from partc.runtime.plan.program import Site

PHASES = ("forward", "backward", "post-aggregation", "update")
LEAST_SHARE = 0.1  # of the nodes of the user's graph: a phase that has fewer is not in the name
# The first of these ops that a segment has tells what is done where nothing is the user's.
DEEDS = (("unique-ids", "Unique"), ("sum", "SumRows"), ("lookup", "Gather"), ("average", "Mul"))
KEY = "partc."  # what names of metadata begin with
PULL = ".pull."  # behind a lookup's name, of what requests its rows
SOURCE = "partc.source_node"  # of a segment's node: the user's node that it stands for


@dataclass(frozen=True)
class SegmentTitle:
    """What a segment is called, and what is said of it. `doc`: sentences, in Markdown."""

    name: str
    doc: str
    metadata: Mapping[str, str]


class SegmentTitler:
    """Titles the segments of a plan, in the order in which they are made.

    `ranks`: who runs the segments of each site. `most`: as many segments as there may be.
    """

    def __init__(
        self, analysis: Analysis, lowered: LoweredGraph, ranks: Mapping[Site, Sequence[int]], most: int
    ) -> None:
        self._phase_of = _phases(analysis)
        self._original, self._asked_with = lowered.original, lowered.asked_with
        self._source_of = _sources(analysis.training.source, lowered)
        self._ranks = ranks
        self._digits = max(2, len(str(most)))
        self._number = 0

    def entitle(self, model: onnx.ModelProto, chunk: Chunk) -> tuple[SegmentTitle, Collection[str]]:
        """Write the next segment's title into it: graph name, documentation, metadata, its nodes' sources.

        Returns the title, and the nodes of the training graph that the segment has.
        """
        self._number += 1
        title = self._title(chunk)
        model.graph.name, model.graph.doc_string = title.name, title.doc
        model.producer_name, model.producer_version, model.doc_string = "partc", _version(), title.doc
        for key, value in title.metadata.items():
            model.metadata_props.add(key=KEY + key, value=value)
        for node in model.graph.node:
            if (source := self._source_of.get(node.name)) is not None:
                node.metadata_props.add(key=SOURCE, value=source)
        return title, set(self._sources_of(chunk))

    def _sources_of(self, chunk: Chunk) -> Iterator[str]:
        """Yield the user's nodes that a segment's stand for, lookups with all that are requested at once."""
        for node in chunk.nodes:
            if (source := self._source_of.get(node.name)) is not None:
                yield source
                yield from self._asked_with.get(source, ()) if PULL in node.name else ()

    def _title(self, chunk: Chunk) -> SegmentTitle:
        originals = [self._original[node.name] for node in chunk.nodes if node.name in self._original]
        counts = Counter(self._phase_of.get(name, "update") for name in originals)
        turn = _turn(chunk)
        does = "-".join([*_deeds(chunk, counts), *([turn] if turn else [])])
        number = f"{self._number:0{self._digits}}"
        ranks = index_ranges(self._ranks[chunk.site])
        phases = ", ".join(f"{counts[phase]} {phase}" for phase in PHASES if counts[phase])
        own = len(chunk.nodes) - len(originals)
        doc = (
            f"Segment {self._number} of a training step that partc divided. Ranks {ranks} run it, as "
            f"`{chunk.site}`{_how_often(chunk, turn)}. It has {len(originals)} nodes of the training graph"
            f"{f' ({phases})' if phases else ''} and {own} that join what ranks compute."
        )
        metadata = {
            "segment": f"{number}-{chunk.site}-{does}",
            "mesh": chunk.site,
            "ranks": ranks,
            "phases": phases,
            "source_nodes": msgspec.json.encode(list(dict.fromkeys(self._sources_of(chunk)))).decode(),
        }
        return SegmentTitle(metadata["segment"], doc, metadata)


def _sources(source: bytes, lowered: LoweredGraph) -> dict[str, str]:
    """Return the user's node of each node that stands for one, or does a part of what one does.

    loss/Max            of loss, which was said in primitives
    Gather_5.pull.ids   of Gather_5, whose table is on servers
    """
    theirs = {node.name for node in onnx.ModelProto.FromString(source).graph.node}
    sources: dict[str, str] = {}
    for node, name in lowered.original.items():
        while name not in theirs and "/" in name:
            name = name.rpartition("/")[0]
        if name in theirs:
            sources[node] = name
    for copy in lowered.nodes:
        name, pull, _ = copy.name.partition(PULL)
        if pull and name in theirs:
            sources[copy.name] = name
    return sources


def _phases(analysis: Analysis) -> dict[str, str]:
    """Return what each node of the training graph is for."""
    phases = dict.fromkeys(analysis.roles.updates, "update")
    phases |= dict.fromkeys(analysis.roles.post_aggregation, "post-aggregation")
    phases |= dict.fromkeys(analysis.main, "backward")
    return phases | {node.name: "forward" for node in forward_nodes(analysis.training, analysis.main)}


def _deeds(chunk: Chunk, counts: Mapping[str, int]) -> list[str]:
    """Return what a segment does: a part of its name."""
    ops = {node.op for node in chunk.nodes}
    least = LEAST_SHARE * sum(counts.values())
    phases = [phase for phase in PHASES if counts.get(phase, 0) > least]
    if chunk.site == "server" and "SumRows" in ops:
        return ["sum", *phases]
    if phases:
        return phases
    if ops == {"Identity"}:
        return ["copy"]
    return [next((deed for deed, op in DEEDS if op in ops), "arrange")]


def _turn(chunk: Chunk) -> str:
    """Return for which micro-batches a segment is, if not for all: the first begins sums, others go on."""
    if not chunk.sums:
        return ""
    begins = any(f"{total.total.name}.begin" == node.name for total in chunk.sums for node in chunk.nodes)
    return "first-microbatch" if begins else "later-microbatches"


def _how_often(chunk: Chunk, turn: str) -> str:
    if not chunk.is_repeated:
        return ", once a step"
    return f", for the {turn.replace('-', ' ')}" if turn else ", for every micro-batch"


@cache
def _version() -> str:
    return version("partc")
