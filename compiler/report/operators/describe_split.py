"""Tell in words, and as a grid of parts, how a node is divided among devices (flexflow.txt, figures 13, 14).

split into 2 by samples and 4 by output columns         rows of the grid: parts of the samples
                                                        columns: parts of other dimensions
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from partc.compiler.report.units import count, join_words
from partc.passes.layouts.decisions import AxisDecision, Decision
from partc.passes.layouts.layouts import REPLICAS, Partial, PerReplica, Split
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.runtime.plan.program import Plan, Site

IMAGES = {"Conv": 2, "ConvTranspose": 2, "MaxPool": 2, "AveragePool": 2}  # op -> its first axis of space
PRODUCTS = frozenset({"MatMul", "Gemm"})


@dataclass(frozen=True, slots=True)
class DividedNode:
    """How a node is divided: in words, and the ranks that compute each part.

    The parts of a row follow each other in `ranks`, row after row; `together` ranks compute each.
    """

    words: str
    rows: int
    columns: int
    together: int
    ranks: tuple[int, ...]


class SplitDescriber:
    """Describes decisions; what is asked again is remembered."""

    def __init__(self, plan: Plan, meshes: Meshes) -> None:
        self._meshes = meshes
        self._workers = tuple(rank.rank for rank in plan.ranks if rank.replica is not None)
        self._servers = tuple(rank.rank for rank in plan.ranks if "server" in rank.sites)
        self._per_replica = plan.batch == "per-replica"
        self._known: dict[tuple[int, str, int, bool, bool], tuple[Decision, DividedNode]] = {}

    def ranks_of(self, site: Site) -> tuple[int, ...]:
        """Return the ranks of a site in the order of its mesh."""
        if site == "server":
            return self._servers
        return tuple(self._workers[worker] for worker in self._meshes.of(site).workers)

    def describe(
        self, decision: Decision, op: str, rank: int, *, updates: bool, samples: bool
    ) -> DividedNode:
        """Return how a node runs.

        `rank`: its result's; `updates`: it is part of an update; `samples`: it divides them among replicas.
        """
        key = id(decision), op, rank, updates, samples
        if key not in self._known:
            self._known[key] = decision, self._describe(decision, op, rank, updates, samples)
        return self._known[key][1]

    def whole_at(self, sites: Sequence[Site]) -> DividedNode:
        """Return the description of what each rank of some sites does alike."""
        ranks = tuple(dict.fromkeys(rank for site in sites for rank in self.ranks_of(site)))
        return DividedNode(_whole_words(len(ranks)), 1, 1, max(1, len(ranks)), ranks)

    def _describe(self, decision: Decision, op: str, rank: int, updates: bool, samples: bool) -> DividedNode:
        if decision.site == "server":
            return self._on_servers(decision)
        mesh = self._meshes.of(decision.site)
        sizes = [size for _, size in mesh.grid]
        axes_of: dict[str, list[int]] = {}
        for axis, along in enumerate(decision.axes[: len(sizes)]):
            dimension = _dimension(along, op, rank, updates, samples and axis == REPLICAS)
            if sizes[axis] > 1 and dimension is not None:
                axes_of.setdefault(dimension, []).append(axis)
        ordered = sorted(axes_of.items(), key=lambda item: item[0] != "samples")
        dividing = [axis for _, axes in ordered for axis in axes]
        repeating = [axis for axis in range(len(sizes)) if axis not in dividing]
        grid = np.array(self.ranks_of(decision.site)).reshape(sizes).transpose([*dividing, *repeating])
        parts = {name: prod(sizes[axis] for axis in axes) for name, axes in ordered}
        rows, together = parts.get("samples", 1), prod(sizes[axis] for axis in repeating)
        words = self._words(parts, together) + _micro_words(mesh, decision)
        return DividedNode(words, rows, prod(parts.values()) // rows, together, tuple(grid.ravel().tolist()))

    def _on_servers(self, decision: Decision) -> DividedNode:
        owned = any(layout.rows_of for layout in (*decision.inputs, *decision.outputs))
        servers = len(self._servers)
        if not owned or servers == 1:
            return self.whole_at(("server",))
        words = f"split into {servers} by the rows that each server owns"
        return DividedNode(words, 1, servers, 1, self._servers)

    def _words(self, parts: Mapping[str, int], together: int) -> str:
        if not parts:
            return _whole_words(together)
        if self._per_replica and set(parts) == {"samples"}:
            divided = f"run by each of {count(parts['samples'])} replicas on its own batch"
        else:
            divided = "split into " + join_words([f"{count(n)} by {name}" for name, n in parts.items()])
        return (
            f"{divided}, each part computed on {count(together)} devices alike" if together > 1 else divided
        )


def _whole_words(devices: int) -> str:
    return f"computed whole, on each of {count(devices)} devices" if devices > 1 else "computed whole"


def _micro_words(mesh: Mesh, decision: Decision) -> str:
    axis = mesh.microbatch_axis
    if axis is None or axis >= len(decision.axes) or decision.axes[axis].is_whole:
        return ""
    return f", in {count(mesh.microbatches)} micro-batches"


def _dimension(along: AxisDecision, op: str, rank: int, updates: bool, samples: bool) -> str | None:
    """Return what a mesh axis divides, None where its ranks do the same."""
    placements = (*along.outputs, *along.inputs)
    split = next((p for p in placements if isinstance(p, Split)), None)
    if split is None:
        return "samples" if any(isinstance(p, PerReplica) for p in placements) else None
    if samples and not updates:
        return "samples"
    if not isinstance(along.outputs[0], Split):
        return (
            "what it sums" if isinstance(along.outputs[0], Partial) else f"axis {split.axis} of what it reads"
        )
    if updates:
        return f"axis {split.axis} of its variable"
    return name_axis(op, split.axis, rank)


def name_axis(op: str, axis: int, rank: int) -> str:
    """Return what an axis of an op's result is called. `rank`: the result's."""
    if op in PRODUCTS and rank > 1 and axis == rank - 1:
        return "output columns"
    if op in PRODUCTS and rank > 1 and axis == rank - 2:
        return "output rows"
    if op in IMAGES and axis >= 1:
        return ("output channels", "image rows", "image columns", "image depth")[min(axis, 4) - 1]
    return f"axis {axis} of its result"


def say_dimension(dimension: str, op: str, rank: int) -> str:
    """Return a dimension in words: `batch`, `out:1`, `in:0:1/4`, as strategies spell them."""
    if dimension == "batch":
        return "samples"
    place, _, blocks = dimension.partition("/")
    kind, *numbers = place.split(":")
    within = f", within each of {blocks} blocks" if blocks else ""
    if kind == "out":
        return name_axis(op, int(numbers[0]), rank) + within
    return f"what it sums (axis {numbers[1]} of operand {int(numbers[0]) + 1}){within}"
