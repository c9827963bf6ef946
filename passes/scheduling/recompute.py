"""Compute values of the forward pass again, where the backward pass would else keep too many.

    forward    segment 1   a = Gelu (h)   ...                  frees a: its next reader computes it again
    backward   segment 7   a' = Gelu (h)  dW = MatMul (a', dy)

As long as the values that exist at once exceed the limit, the one is given up that costs the fewest seconds
per byte at the peak: of those that exist there, but are read only before and after. It is computed again
in the segment of its next reader, from what exists there; what does not, is computed again as well. This
is the problem of Jain et al., "Checkmate" (MLSys 2020), whose schedules keep the order of stages too; the
choice is greedy, with the lives of all values worked out anew after each step.

A copy must not meet its original in one segment, where ONNX Runtime would merge the two. So segments are cut
shorter first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import inf

import onnx_graphsurgeon as gs

from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.live_values import Lives, lives_of, nodes_of, sizes_of_values
from partc.passes.scheduling.schedule import Chunk, Item
from partc.runtime.errors import NoPlacement

Seconds = Callable[[int, int], float]  # what flops and bytes read and written take

PIECES = 32  # a segment makes about this part of the most that exists at once
LEAST_SHARE = 1e-4  # of the limit: smaller values are not worth a node


@dataclass(frozen=True)
class Recomputation:
    """The schedule with copies, and what they bring."""

    items: list[Item]
    before_bytes: int  # the most that existed at once
    after_bytes: int
    values: int = 0  # computed again
    flops: int = 0


def recompute(
    items: Sequence[Item],
    lowered: LoweredGraph,
    main: AbstractSet[str],
    limit_bytes: int,
    seconds: Seconds,
) -> Recomputation:
    """Return the schedule in which values of the `main` nodes take at most so many bytes at once.

    Adds nodes to `lowered`. Raises NoPlacement where no choice of values meets the limit.
    """
    sizes = sizes_of_values(items, lowered, main)
    before = lives_of([node for _, node in nodes_of(items, "worker")], sizes)
    if before.peak_bytes <= limit_bytes:
        return Recomputation(list(items), before.peak_bytes, before.peak_bytes)
    pieces = _cut(items, sizes, before.peak_bytes // PIECES)
    outputs = {value for _, value, _ in lowered.outputs}
    search = _Search(pieces, lowered, sizes, limit_bytes, seconds, outputs)
    return search.run(before.peak_bytes)


def _cut(items: Sequence[Item], sizes: Mapping[str, int], most_bytes: int) -> list[Item]:
    """Cut the workers' segments, so that each makes about `most_bytes`."""
    result: list[Item] = []
    for item in items:
        if not isinstance(item, Chunk) or item.site != "worker":
            result.append(item)
            continue
        piece, piece_bytes = Chunk("worker"), 0
        for node in item.nodes:
            piece.nodes.append(node)
            piece_bytes += sum(sizes.get(tensor.name, 0) for tensor in node.outputs)
            if piece_bytes >= most_bytes:
                result.append(piece)
                piece, piece_bytes = Chunk("worker"), 0
        if piece.nodes:
            result.append(piece)
    return result


@dataclass(frozen=True, slots=True)
class _Option:
    """Nodes to compute again, in order, before a position of an item."""

    value: str
    nodes: tuple[gs.Node, ...]
    before: int  # position of the first reader behind the peak
    seconds: float


@dataclass
class _Search:
    items: list[Item]
    lowered: LoweredGraph
    sizes: dict[str, int]
    limit_bytes: int
    seconds: Seconds
    settled: set[str]  # values that stay as they are now
    copies: dict[str, str] = field(default_factory=dict)  # copy -> the value that it stands for
    recomputed: list[gs.Node] = field(default_factory=list)

    def run(self, before_bytes: int) -> Recomputation:
        self._update_lives()
        while self.lives.peak_bytes > self.limit_bytes:
            self._apply(self._cheapest())
            self._update_lives()
        flops = sum(self.lowered.flops.get(node.name, 0) for node in self.recomputed)
        return Recomputation(self.items, before_bytes, self.lives.peak_bytes, len(self.recomputed), flops)

    def _update_lives(self) -> None:
        """Work out who makes and reads what, now."""
        indexed_nodes = nodes_of(self.items, "worker")
        self.item_at = [index for index, _ in indexed_nodes]
        self.nodes = [node for _, node in indexed_nodes]
        self.lives: Lives = lives_of(self.nodes, self.sizes)
        self.versions: dict[str, list[str]] = {}
        for value in self.lives.values:
            self.versions.setdefault(self._original(value), []).append(value)

    # ------------------------------------------------------------ what may be given up

    def _cheapest(self) -> _Option:
        """Return what frees bytes at the peak in the fewest seconds each. Raises NoPlacement."""
        best: _Option | None = None
        for value, before in self._candidates():
            s_per_byte = inf if best is None else best.seconds / self.sizes[best.value]
            found = self._option_for(value, before, s_per_byte * self.sizes[value])
            if found is not None:
                best = found
        if best is None:
            raise self._infeasible()
        return best

    def _candidates(self) -> Iterator[tuple[str, int]]:
        """Return values that exist at the peak and are not read there, and their first reader behind it."""
        peak = self.lives.peak
        for value, life in self.lives.values.items():
            if self.sizes.get(value, 0) < LEAST_SHARE * self.limit_bytes or value in self.settled:
                continue
            if not life.produced_at < peak < life.last:
                continue
            last_read = max((place for place in life.reads if place <= peak), default=life.produced_at)
            following = next(place for place in life.reads if place > peak)
            reader = self.items[self.item_at[following]]
            if (
                last_read == peak
                or self.item_at[last_read] == self.item_at[following]
                or not isinstance(reader, Chunk)
            ):
                continue
            yield value, following

    def _option_for(self, value: str, before: int, below_s: float) -> _Option | None:
        """Return what computes a value again before a position; None if that cannot be, takes as long as
        `below_s`, or is in vain."""
        nodes: dict[str, gs.Node] = {}
        seconds = 0.0
        pending = [self.nodes[self.lives.values[value].produced_at]]
        while pending:
            node = pending.pop()
            if node.name in nodes:
                continue
            made_in = self.item_at[self._position_of(node)]
            if not isinstance(self.items[made_in], Chunk) or made_in == self.item_at[before]:
                return None
            nodes[node.name] = node
            seconds += self._seconds_of(node)
            if seconds >= below_s:
                return None
            pending += filter(None, (self._missing(tensor, before) for tensor in node.inputs))
        ordered = tuple(sorted(nodes.values(), key=self._position_of))
        beside = lives_of(ordered, self.sizes).peak_bytes - self.sizes[value]
        if self.lives.bytes_at[before] + beside >= self.lives.peak_bytes:
            return None
        return _Option(value, ordered, before, seconds)

    def _position_of(self, node: gs.Node) -> int:
        return self.lives.values[_first_output(node)].produced_at

    def _missing(self, tensor: gs.Tensor, before: int) -> gs.Node | None:
        """Return the node that first made a tensor which does not exist before a position."""
        if self._version(tensor.name, before) is not None or tensor.name not in self.lives.values:
            return None
        return self.nodes[self.lives.values[self._original(tensor.name)].produced_at]

    def _original(self, value: str) -> str:
        return self.copies.get(value, value)

    def _version(self, value: str, before: int) -> str | None:
        """Return the value, or a copy of it, that exists before a position, or is made in its segment."""
        for name in reversed(self.versions.get(self._original(value), [])):
            life = self.lives.values[name]
            is_here = self.item_at[life.produced_at] == self.item_at[before]
            if life.produced_at < before and (life.last >= before or is_here):
                return name
        return None

    def _seconds_of(self, node: gs.Node) -> float:
        names = [tensor.name for tensor in (*node.inputs, *node.outputs)]
        known = (name for name in names if None not in self.lowered.shapes.get(name, (None,)))
        nbytes = sum(self.lowered.nbytes.get(name, 0) for name in known)
        return self.seconds(self.lowered.flops.get(node.name, 0), nbytes)

    # ------------------------------------------------------------ giving it up

    def _apply(self, found: _Option) -> None:
        item = self.items[self.item_at[found.before]]
        renamed: dict[str, gs.Variable] = {}
        copies = [self._copy(node, found.before, renamed) for node in found.nodes]
        place = next(i for i, node in enumerate(item.nodes) if node is self.nodes[found.before])
        assert isinstance(item, Chunk)
        item.nodes[place:place] = copies
        self.recomputed += copies
        self.settled |= {found.value, *(tensor.name for copy in copies for tensor in copy.outputs)}
        for reader in self.nodes[found.before :]:
            for index, tensor in enumerate(reader.inputs):
                if self._original(tensor.name) in renamed:
                    reader.inputs[index] = renamed[self._original(tensor.name)]

    def _copy(self, node: gs.Node, before: int, renamed: dict[str, gs.Variable]) -> gs.Node:
        """Return a node like another, which reads what exists before a position."""
        inputs = [renamed.get(self._original(t.name)) or self._as_it_exists(t, before) for t in node.inputs]
        outputs = [self._copied(tensor) if tensor.name else tensor for tensor in node.outputs]
        renamed |= {t.name: copied for t, copied in zip(node.outputs, outputs, strict=True) if t.name}
        name = f"{node.name}/again{len(self.versions[_first_output(node)])}"
        copy = gs.Node(node.op, name, dict(node.attrs), inputs, outputs, domain=node.domain)
        lowered = self.lowered
        lowered.append(copy, "worker")
        lowered.has_grown = True
        lowered.flops[copy.name] = lowered.flops.get(node.name, 0)
        lowered.original[copy.name] = lowered.original.get(node.name, node.name)
        return copy

    def _as_it_exists(self, tensor: gs.Tensor, before: int) -> gs.Tensor:
        name = self._version(tensor.name, before)
        if name is None or name == tensor.name:
            return tensor
        return gs.Variable(name, dtype=tensor.dtype)

    def _copied(self, tensor: gs.Variable) -> gs.Variable:
        name = f"{tensor.name}/again{len(self.versions[tensor.name])}"
        self.copies[name] = tensor.name
        self.sizes[name] = self.sizes.get(tensor.name, 0)
        self.lowered.nbytes[name] = self.lowered.nbytes.get(tensor.name, 0)
        if tensor.name in self.lowered.shapes:
            self.lowered.shapes[name] = self.lowered.shapes[tensor.name]
        return gs.Variable(name, dtype=tensor.dtype)

    def _infeasible(self) -> NoPlacement:
        return NoPlacement(
            f"a step's values take {self.lives.peak_bytes} bytes at once, whatever is computed again",
            at=f"--recompute {self.limit_bytes}",
            fix=f"allow {self.lives.peak_bytes} bytes, or use smaller batches",
        )


def _first_output(node: gs.Node) -> str:
    return next(str(tensor.name) for tensor in node.outputs if tensor.name)
