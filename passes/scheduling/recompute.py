"""Compute values of the forward pass again, where the backward pass would else keep too many.

    forward    segment 1   a = Gelu (h)   ...                  frees a: its next reader computes it again
    backward   segment 7   a' = Gelu (h)  dW = MatMul (a', dy)

As long as the values that exist at once on a rank exceed the limit, the one is given up that costs the
fewest seconds per byte at the peak: of those that exist there, but are read only before and after. It is
computed again in the segment of its next reader, from what exists there; what does not, is computed again as
well. This is the problem of Jain et al., "Checkmate" (MLSys 2020), whose schedules keep the order of stages
too; the choice is greedy, with the lives of all values worked out anew after each step.

A rank runs what the meshes that it is in run, in the order of their turns. What is computed again is so for
each micro-batch, and frees the bytes of all that wait under way.

A copy must not meet its original in one segment, where ONNX Runtime would merge the two. So segments are cut
shorter first (`cut_shorter`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import inf

import onnx_graphsurgeon as gs

from partc.passes.layouts.meshes import Meshes
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.microbatches.find_repeated import Repeated
from partc.passes.microbatches.take_turns import Turn
from partc.passes.scheduling.live_values import Lives, lives_in, lives_of, sizes_of_values
from partc.passes.scheduling.schedule import Chunk, Item
from partc.runtime.errors import OverLimit
from partc.runtime.plan.program import Site

Seconds = Callable[[int, int], float]  # what flops and bytes read and written take
Sites = frozenset[Site]  # the meshes that a rank is in

PIECES = 32  # a segment makes about this part of the most that exists at once
LEAST_SHARE = 1e-4  # of the limit: smaller values are not worth a node


class Cutter:
    """Cuts the workers' segments, so that each makes about a small part of the most that exists at once.

    What runs for each micro-batch is cut alike for all.
    """

    def __init__(self, lowered: LoweredGraph, sizes: Mapping[str, int], peak_bytes: int) -> None:
        self._sites = lowered.meshes.sites
        self._sizes = sizes
        self._most_bytes = peak_bytes // PIECES
        self._pieces: dict[int, list[Item]] = {}

    def cut(self, item: Item) -> list[Item]:
        """Return the pieces of an item, in order: itself, if it is no segment of workers."""
        if not isinstance(item, Chunk) or item.site not in self._sites or not item.nodes:
            return [item]
        if id(item) not in self._pieces:
            self._pieces[id(item)] = list(self._cut_chunk(item))
        return self._pieces[id(item)]

    def _cut_chunk(self, chunk: Chunk) -> Iterator[Item]:
        """Yield pieces; a sum over micro-batches goes with the piece that makes its term."""
        nodes: list[gs.Node] = []
        piece_bytes = 0
        for node in chunk.nodes:
            nodes.append(node)
            piece_bytes += sum(self._sizes.get(tensor.name, 0) for tensor in node.outputs)
            if piece_bytes >= self._most_bytes or node is chunk.nodes[-1]:
                results = {tensor.name for own in nodes for tensor in own.outputs}
                sums = tuple(total for total in chunk.sums if total.term.name in results)
                yield replace(chunk, nodes=nodes, sums=sums)
                nodes, piece_bytes = [], 0


def _sites_of_ranks(meshes: Meshes) -> list[Sites]:
    """Return the meshes that workers are in, those of each kind of worker once."""
    workers = {worker for mesh in meshes.each for worker in mesh.workers}
    of_worker = (frozenset(mesh.name for mesh in meshes.each if w in mesh.workers) for w in sorted(workers))
    return list(dict.fromkeys(of_worker))


@dataclass(frozen=True, slots=True)
class _Step:
    """A node of an item, as a micro-batch runs it."""

    item: Item
    node: gs.Node
    microbatch: int | None


@dataclass(frozen=True, slots=True)
class _Option:
    """Nodes to compute again, in order, before a position."""

    value: str
    nodes: tuple[gs.Node, ...]
    before: int  # position of the first reader behind the peak
    seconds: float
    freed_bytes: int  # at the peak, of all micro-batches


class Recomputation:
    """The search, and what it has added to the schedule so far.

    Of the values of `main` nodes, those of known sizes are counted.
    """

    def __init__(
        self,
        lowered: LoweredGraph,
        repeated: Repeated,
        main: AbstractSet[str],
        limit_bytes: int,
        seconds: Seconds,
    ) -> None:
        self.lowered = lowered
        self.repeated = repeated  # with copies of what there is of every micro-batch
        self.nodes: list[gs.Node] = []  # computed again
        self._main = main
        self._limit_bytes = limit_bytes
        self._seconds = seconds
        self._ranks = _sites_of_ranks(lowered.meshes)
        self._sizes: dict[str, int] = {}
        self._settled = {value for _, value, _ in lowered.outputs}  # values that stay as they are now
        self._copies: dict[str, str] = {}  # copy -> the value that it stands for

    @property
    def flops(self) -> int:
        """Return the operations that run again in a step."""
        times = {node.name: self.repeated.count for node in self.nodes if node.name in self.repeated.nodes}
        return sum(self.lowered.flops.get(node.name, 0) * times.get(node.name, 1) for node in self.nodes)

    def most_bytes(self, turns: Sequence[Turn]) -> int:
        """Return the most bytes that values take at once on a rank."""
        self._begin(turns)
        return max(self._look_at(sites).peak_bytes for sites in self._ranks)

    def fit(self, turns: Sequence[Turn]) -> None:
        """Add nodes to the turns' segments, and to `lowered`, until all ranks keep to the limit.

        The turns keep their order. Raises OverLimit where no choice of values meets the limit.
        """
        self._begin(turns)
        stuck: set[Sites] = set()
        while over := [sites for sites in self._ranks if sites not in stuck and self._exceeds(sites)]:
            for sites in over:
                while sites not in stuck and self._exceeds(sites):
                    option = self._cheapest()
                    if option is None:
                        stuck.add(sites)
                    else:
                        self._apply(option)
        if stuck:
            raise self._infeasible()

    def _begin(self, turns: Sequence[Turn]) -> None:
        items = list({id(turn.item): turn.item for turn in turns}.values())
        self._turns = turns
        self._sizes = sizes_of_values(items, self.lowered, self._main)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the bytes of the values that are counted."""
        return self._sizes

    def _exceeds(self, sites: Sites) -> bool:
        return self._look_at(sites).peak_bytes > self._limit_bytes

    def _look_at(self, sites: Sites) -> Lives:
        """Work out who makes and reads what, now, on the ranks of some meshes; return the lives of values."""
        self._steps = [
            _Step(turn.item, node, turn.microbatch)
            for turn in self._turns
            if not isinstance(turn.item, Chunk) or turn.item.site in sites
            for node in _nodes_of(turn)
        ]
        self._position = {(id(step.node), step.microbatch): n for n, step in enumerate(self._steps)}
        self._base: dict[str, str] = {}  # name of a micro-batch's value -> the value
        named = [
            [
                [self._name(t.name, step.microbatch) for t in ts]
                for ts in (step.node.inputs, step.node.outputs)
            ]
            for step in self._steps
        ]
        sizes = {name: size for name, base in self._base.items() if (size := self._sizes.get(base, 0))}
        self._lives = lives_in(named, sizes)
        self._versions: dict[str, list[str]] = {}
        for name in self._lives.values:
            self._versions.setdefault(self._original(self._base[name]), []).append(self._base[name])
        return self._lives

    def _names(self, tensors: Sequence[gs.Tensor], microbatch: int | None) -> list[str]:
        return [self._name(tensor.name, microbatch) for tensor in tensors]

    def _name(self, value: str, microbatch: int | None) -> str:
        name = self.repeated.name(value, microbatch)
        self._base.setdefault(name, value)  # one that joins micro-batches reads each by its name
        return name

    # ------------------------------------------------------------ what may be given up

    def _cheapest(self) -> _Option | None:
        """Return what frees bytes at the peak in the fewest seconds each, None if nothing does."""
        best: _Option | None = None
        for value, before, freed_bytes in self._candidates():
            s_per_byte = inf if best is None else best.seconds / best.freed_bytes
            option = self._option_for(value, before, freed_bytes, s_per_byte * freed_bytes)
            if option is not None:
                best = option
        return best

    def _candidates(self) -> Iterator[tuple[str, int, int]]:
        """Return values that exist at the peak and are not read there, who reads them next, and their bytes.

        Of several micro-batches with the same reader, that where most exists when it reads.
        """
        readers_of: dict[tuple[str, int], list[int]] = {}
        for name in self._lives.values:
            before = self._reader_behind_peak(name)
            if before is not None:
                readers_of.setdefault((self._base[name], id(self._steps[before].node)), []).append(before)
        for (value, _), readers in readers_of.items():
            yield value, max(readers, key=self._lives.bytes_at.__getitem__), len(readers) * self._sizes[value]

    def _reader_behind_peak(self, name: str) -> int | None:
        """Return the position of the first reader behind the peak of a value that may be given up."""
        peak, life, value = self._lives.peak, self._lives.values[name], self._base[name]
        if self._sizes.get(value, 0) < LEAST_SHARE * self._limit_bytes or value in self._settled:
            return None
        if not life.produced_at < peak < life.last:
            return None
        last_read = max((place for place in life.reads if place <= peak), default=life.produced_at)
        following = next(place for place in life.reads if place > peak)
        step = self._steps[following]
        if last_read == peak or self._steps[last_read].item is step.item or not isinstance(step.item, Chunk):
            return None
        if self._steps[life.produced_at].microbatch != step.microbatch:
            return None  # it is joined with those of others
        return following if any(node is step.node for node in step.item.nodes) else None

    def _option_for(self, value: str, before: int, freed_bytes: int, below_s: float) -> _Option | None:
        """Return what computes a value again before a position; None if that cannot be, takes as long as
        `below_s`, or is in vain."""
        nodes: dict[str, gs.Node] = {}
        seconds, reader = 0.0, self._steps[before]
        assert isinstance(reader.item, Chunk)
        pending = [self._maker(value, before)]
        while pending:
            maker = self._steps[pending.pop()]
            if maker.node.name in nodes:
                continue
            item = maker.item
            if (
                not isinstance(item, Chunk)
                or item is reader.item
                or item.is_repeated != reader.item.is_repeated
                or _first_output(maker.node) in {s.total.name for s in item.sums}  # over micro-batches
            ):
                return None
            nodes[maker.node.name] = maker.node
            seconds += self._seconds_of(maker.node)
            if seconds >= below_s:
                return None
            for tensor in maker.node.inputs:
                if (place := self._missing(tensor, before)) is not None:
                    pending.append(place)
                elif not self._is_made_before(tensor, before):
                    return None
        ordered = tuple(sorted(nodes.values(), key=lambda node: self._maker(_first_output(node), before)))
        beside = lives_of(ordered, self._sizes).peak_bytes - self._sizes[value]
        if self._lives.bytes_at[before] + beside >= self._lives.peak_bytes:
            return None
        return _Option(value, ordered, before, seconds, freed_bytes)

    def _maker(self, value: str, before: int) -> int:
        """Return the position of the node that makes a value, of the micro-batch that runs at another."""
        return self._lives.values[self._name(value, self._steps[before].microbatch)].produced_at

    def _missing(self, tensor: gs.Tensor, before: int) -> int | None:
        """Return the position of the node that first made a tensor which does not exist before a position."""
        original = self._original(tensor.name)
        is_made = self._name(original, self._steps[before].microbatch) in self._lives.values
        if not is_made or self._version(tensor.name, before) is not None:
            return None
        return self._maker(original, before)

    def _is_made_before(self, tensor: gs.Tensor, before: int) -> bool:
        """Tell whether what exists of a tensor before a position does so for all micro-batches."""
        version, reader = self._version(tensor.name, before), self._steps[before]
        if version is None:
            return True
        moments = (
            [m for node, m in self._position if node == id(reader.node)]
            if reader.microbatch is not None
            else [None]
        )
        return all(
            self._lives.values[self._name(version, moment)].produced_at
            < self._position[id(reader.node), moment]
            for moment in moments
        )

    def _original(self, value: str) -> str:
        return self._copies.get(value, value)

    def _version(self, value: str, before: int) -> str | None:
        """Return the value, or a copy of it, that exists before a position, or is made in its segment."""
        reader = self._steps[before]
        for version in reversed(self._versions.get(self._original(value), [])):
            life = self._lives.values.get(self._name(version, reader.microbatch))
            if life is None:
                continue
            is_here = self._steps[life.produced_at].item is reader.item
            if life.produced_at < before and (life.last >= before or is_here):
                return version
        return None

    def _seconds_of(self, node: gs.Node) -> float:
        names = [tensor.name for tensor in (*node.inputs, *node.outputs)]
        known = (name for name in names if None not in self.lowered.shapes.get(name, (None,)))
        nbytes = sum(self.lowered.nbytes.get(name, 0) for name in known)
        return self._seconds(self.lowered.flops.get(node.name, 0), nbytes)

    # ------------------------------------------------------------ giving it up

    def _apply(self, option: _Option) -> None:
        reader = self._steps[option.before]
        item = reader.item
        assert isinstance(item, Chunk)
        renamed: dict[str, gs.Variable] = {}
        copies = [self._copy(node, option.before, renamed) for node in option.nodes]
        place = next(i for i, node in enumerate(item.nodes) if node is reader.node)
        item.nodes[place:place] = copies
        self.nodes += copies
        self._settled |= {option.value, *(tensor.name for copy in copies for tensor in copy.outputs)}
        behind = self._steps[option.before :]
        for node in (step.node for step in behind if step.microbatch == reader.microbatch):
            for index, tensor in enumerate(node.inputs):
                if self._original(tensor.name) in renamed:
                    node.inputs[index] = renamed[self._original(tensor.name)]

    def _copy(self, node: gs.Node, before: int, renamed: dict[str, gs.Variable]) -> gs.Node:
        """Return a node like another, which reads what exists before a position."""
        item = self._steps[before].item
        assert isinstance(item, Chunk)
        inputs = [renamed.get(self._original(t.name)) or self._as_it_exists(t, before) for t in node.inputs]
        outputs = [self._copied(tensor) if tensor.name else tensor for tensor in node.outputs]
        renamed |= {t.name: copied for t, copied in zip(node.outputs, outputs, strict=True) if t.name}
        name = f"{node.name}/again{self._number(_first_output(node))}"
        copy = gs.Node(node.op, name, dict(node.attrs), inputs, outputs, domain=node.domain)
        lowered = self.lowered
        lowered.append(copy, item.site)
        lowered.flops[copy.name] = lowered.flops.get(node.name, 0)
        if node.name in lowered.original:
            lowered.original[copy.name] = lowered.original[node.name]
        if item.is_repeated:
            values = {tensor.name for tensor in outputs if tensor.name}
            known = self.repeated
            self.repeated = replace(known, values=known.values | values, nodes=known.nodes | {copy.name})
        return copy

    def _number(self, value: str) -> int:
        """Return how many there are of a value: it, and its copies."""
        return len(set(self._versions[self._original(value)]))

    def _as_it_exists(self, tensor: gs.Tensor, before: int) -> gs.Tensor:
        name = self._version(tensor.name, before)
        if name is None or name == tensor.name:
            return tensor
        return gs.Variable(name, dtype=tensor.dtype)

    def _copied(self, tensor: gs.Variable) -> gs.Variable:
        name = f"{tensor.name}/again{self._number(tensor.name)}"
        self._copies[name] = tensor.name
        self._sizes[name] = self._sizes.get(tensor.name, 0)
        self.lowered.nbytes[name] = self.lowered.nbytes.get(tensor.name, 0)
        if tensor.name in self.lowered.shapes:
            self.lowered.shapes[name] = self.lowered.shapes[tensor.name]
        return gs.Variable(name, dtype=tensor.dtype)

    def _infeasible(self) -> OverLimit:
        least_bytes = max(self._look_at(sites).peak_bytes for sites in self._ranks)
        return OverLimit(
            f"a step's values take {least_bytes} bytes at once, whatever is computed again",
            at=f"--recompute {self._limit_bytes}",
            fix=f"allow {least_bytes} bytes, or use smaller batches",
        )


def _nodes_of(turn: Turn) -> Sequence[gs.Node]:
    return turn.item.nodes_of(turn.microbatch) if isinstance(turn.item, Chunk) else turn.item.nodes


def _first_output(node: gs.Node) -> str:
    return next(str(tensor.name) for tensor in node.outputs if tensor.name)
