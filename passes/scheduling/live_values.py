"""Which values exist when: from the node that makes one to the last that reads it, in the schedule's order.

ONNX Runtime orders the nodes of a segment in its own way (session_memory.py); segments keep theirs.
Counted are what a step makes and lets go: variables and communication buffers last, and are counted
elsewhere (memory.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.schedule import Chunk, Item


@dataclass(frozen=True, slots=True)
class Life:
    """Where a value is made and read: positions in the sequence of a site's nodes, ascending."""

    produced_at: int
    reads: tuple[int, ...]

    @property
    def last(self) -> int:
        """Return the position after which it is let go."""
        return max(self.produced_at, *self.reads) if self.reads else self.produced_at


@dataclass(frozen=True)
class Lives:
    """The lives of a site's values, and the bytes that exist at every position."""

    values: Mapping[str, Life]
    bytes_at: tuple[int, ...]

    @property
    def peak(self) -> int:
        """Return the position at which most bytes exist, the first of several."""
        return max(range(len(self.bytes_at)), key=self.bytes_at.__getitem__, default=0)

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes that exist at once."""
        return max(self.bytes_at, default=0)


def sizes_of_values(items: Sequence[Item], lowered: LoweredGraph, main: AbstractSet[str]) -> dict[str, int]:
    """Return the bytes of the values that `main` nodes of the original graph make, where shapes are known."""
    lasting = {state.next for state in lowered.states}
    for item in items:
        if not isinstance(item, Chunk) and item.bucket is not None:
            lasting.update((*item.reads, *item.writes))
    results = {t.name for n in lowered.nodes if lowered.original.get(n.name) in main for t in n.outputs}
    return {
        value: lowered.nbytes[value]
        for value in results - lasting
        if value in lowered.nbytes and None not in lowered.shapes.get(value, (None,))
    }


def lives_of(
    nodes: Sequence[gs.Node], sizes: Mapping[str, int], lasting: AbstractSet[str] = frozenset()
) -> Lives:
    """Return the lives of what the nodes make, in their order. `lasting` bytes exist until the end."""
    steps = ([[t.name for t in tensors] for tensors in (node.inputs, node.outputs)] for node in nodes)
    return lives_in(steps, sizes, lasting)


def lives_in(
    steps: Iterable[Sequence[Sequence[str]]],
    sizes: Mapping[str, int],
    lasting: AbstractSet[str] = frozenset(),
) -> Lives:
    """Return the lives of values of which each step reads some and makes others: (reads, writes)."""
    produced_at: dict[str, int] = {}
    reads: dict[str, list[int]] = {}
    count = 0
    for position, (inputs, outputs) in enumerate(steps):
        count += 1
        for name in inputs:
            if name in produced_at:
                reads[name].append(position)
        for name in filter(None, outputs):
            produced_at[name] = position
            reads[name] = []
    values = {value: Life(place, tuple(reads[value])) for value, place in produced_at.items()}
    change = [0] * (count + 1)
    for value, life in values.items():
        change[life.produced_at] += sizes.get(value, 0)
        end = count if value in lasting else life.last + 1
        change[end] -= sizes.get(value, 0)
    bytes_at: list[int] = []
    for grown in change[:-1]:
        bytes_at.append((bytes_at[-1] if bytes_at else 0) + grown)
    return Lives(values, tuple(bytes_at))
