"""Put what runs for every micro-batch in an order: one forward, one backward (1F1B).

    stage 0   F0 F1 .  B0 F2 B1 .  B2    every stage sends on what others wait for, then takes what is back,
    stage 1   .  F0 B0 F1 B1 F2 B2 .     and has at most as many under way as there are stages from it on

Where messages take time and the step is the shorter for it, a stage has up to three times as many under way.
Which turns are on the way out and which on the way back, one micro-batch alone shows: between them its mesh
waits longest.

The order is that of a simulated step: each mesh runs, when it is free, what is ready. One list holds all
meshes' turns by the time at which they begin; a message begins right behind the segment that makes it, so
that who receives it is ready when it comes (Narayanan et al. 2019, PipeDream, section 3.2; Fan et al. 2021,
DAPPLE, section 3; more under way where messages are slow is the eager 1F1B of Zhuang et al. 2023, On
Optimizing the Communication of Model Parallelism, section 4). Several orders are made, and each is run again
as ranks would: they begin messages in their programs' order, and send or receive one after the other.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from partc.passes.microbatches.find_repeated import Repeated
from partc.passes.scheduling.schedule import Chunk, Communication, Item
from partc.runtime.plan.program import Site

LIGHT_SHARE = 0.02  # of a mesh's work for one micro-batch: what is less holds nothing that matters
IDLE_SHARE = 0.02  # of what the busiest mesh does for one: a shorter wait parts no way out from a way back
UNDER_WAY = (1, 2, 3)  # times as many micro-batches as 1F1B has
WORTH_SHARE = 0.02  # of a step: what is saved must be more, that memory is taken for more of them


@dataclass(frozen=True, slots=True)
class Turn:
    """An item of the schedule, for one micro-batch where it runs for each."""

    item: Item
    microbatch: int | None = None


@dataclass(frozen=True, slots=True)
class TakenTurns:
    """All turns of a step in one order, and when the last mesh is done with its own."""

    turns: list[Turn]
    length_s: float


def take_turns(
    items: Sequence[Item],
    repeated: Repeated,
    overwrites: Sequence[tuple[str, str]],
    sites: Sequence[Site],
    seconds: Callable[[Item], float],
) -> list[TakenTurns]:
    """Return all turns of a step in one order, and in others that are shorter and take more memory.

    In the first no more micro-batches are under way than 1F1B has; each other has more, and saves 2 % by it.

    overwrites  (value, next): what makes `next` may write over `value`, so it comes behind all its readers
    sites       the workers' meshes in order
    seconds     what an item takes
    """
    if repeated.count == 1:
        return [TakenTurns([Turn(item) for item in items], 0.0)]  # nothing to choose: the order is given
    takes = {id(item): seconds(item) for item in items}
    turns, outward = _Turns(items, repeated, overwrites), _way_out(items, repeated, takes)
    taken: list[TakenTurns] = []
    for times in UNDER_WAY:
        limits = {site: times * (len(sites) - number) for number, site in enumerate(sites)}
        orders = [_Play(turns, takes, limits, outward, has_wires).taken for has_wires in (True, False)]
        length_s, number = min((_run_again(turns, takes, order), n) for n, order in enumerate(orders))
        if taken and length_s >= (1 - WORTH_SHARE) * taken[-1].length_s:
            break
        taken.append(TakenTurns([turns.turns[place] for place in orders[number]], length_s))
    return taken


def _way_out(items: Sequence[Item], repeated: Repeated, takes: Mapping[int, float]) -> set[int]:
    """Play one micro-batch without others: return the places of what each mesh does before its longest wait.

    That is the way out; what follows is the way back.
    """
    turns = _Turns(items, replace(repeated, count=1), ())
    play = _Play(turns, takes, {}, ())
    idle_s = IDLE_SHARE * max(play.work_s.values(), default=0.0)
    own: dict[Site, list[int]] = defaultdict(list)
    for number in play.taken:
        item = turns.turns[number].item
        if isinstance(item, Chunk) and turns.turns[number].microbatch is not None:
            own[item.site].append(number)
    outward: set[int] = set()
    for numbers in own.values():
        waits = [
            (play.begin_s[after] - play.stop_s(before), play.begin_s[after])
            for before, after in pairwise(number for number in numbers if play.is_heavy[number])
        ]
        wait_s, back_s = max(waits, default=(0.0, 0.0))
        if wait_s > idle_s:
            outward.update(turns.places[number] for number in numbers if play.begin_s[number] < back_s)
    return outward


def _run_again(turns: "_Turns", takes: Mapping[int, float], order: Sequence[int]) -> float:
    """Return when the last mesh is done, if all begin their turns and messages in this order."""
    free_s: dict[tuple[str, Site], float] = defaultdict(float)
    stop_s: dict[int, float] = {}
    for number in order:
        item = turns.turns[number].item
        is_message = isinstance(item, Communication)
        sites = _ends(item) if isinstance(item, Communication) else {item.site}
        computed_s = max((free_s["computes", site] for site in sites), default=0.0)
        sent_s = max((free_s["sends", site] for site in sites), default=0.0) if is_message else 0.0
        made_s = max((stop_s[source] for source in turns.before[number]), default=0.0)
        stop_s[number] = max(computed_s, sent_s, made_s) + takes[id(item)]
        free_s.update({("sends" if is_message else "computes", site): stop_s[number] for site in sites})
    return max(stop_s.values(), default=0.0)


def _ends(message: Communication) -> set[Site]:
    """Return the meshes that send or receive a message."""
    return {node.attrs[end] for node in message.nodes for end in ("site", "to") if end in node.attrs}


class _Turns:
    """All turns, numbered, and which of them each waits for."""

    def __init__(
        self, items: Sequence[Item], repeated: Repeated, overwrites: Sequence[tuple[str, str]]
    ) -> None:
        self.turns: list[Turn] = []
        self.places: list[int] = []  # of each turn's item among the items
        for place, item in enumerate(items):
            for microbatch in range(repeated.count) if _is_repeated(item, repeated) else (None,):
                self.turns.append(Turn(item, microbatch))
                self.places.append(place)
        self.before: list[set[int]] = [set() for _ in self.turns]
        self.after: list[set[int]] = [set() for _ in self.turns]
        self._join(repeated, overwrites)
        self.leads = self._find_leading()  # whether a message of the same micro-batch comes of each

    def _join(self, repeated: Repeated, overwrites: Sequence[tuple[str, str]]) -> None:
        makers: dict[str, int] = {}
        readers: dict[str, list[int]] = defaultdict(list)
        for number, turn in enumerate(self.turns):
            for name in _writes(turn, repeated):
                makers[name] = number  # of a sum: the last micro-batch's, which waits for those before
        for number, turn in enumerate(self.turns):
            for name in _reads(turn, repeated):
                readers[name].append(number)
                if name in makers and makers[name] != number:
                    self._add(makers[name], number)
            has_sums = isinstance(turn.item, Chunk) and turn.item.sums
            if has_sums and turn.microbatch:
                self._add(number - 1, number)
        for value, following in overwrites:
            if following not in makers:
                continue
            writer = makers[following]
            for reader in readers[value]:
                if self.places[reader] < self.places[writer]:
                    self._add(reader, writer)

    def _find_leading(self) -> list[bool]:
        leads = [isinstance(turn.item, Communication) for turn in self.turns]
        reached = [number for number, is_message in enumerate(leads) if is_message]
        while reached:
            number = reached.pop()
            for source in self.before[number]:
                if not leads[source] and self.turns[source].microbatch == self.turns[number].microbatch:
                    leads[source] = True
                    reached.append(source)
        return leads

    def _add(self, first: int, second: int) -> None:
        self.before[second].add(first)
        self.after[first].add(second)


def _is_repeated(item: Item, repeated: Repeated) -> bool:
    return item.is_repeated if isinstance(item, Chunk) else item.nodes[0].name in repeated.nodes


def _reads(turn: Turn, repeated: Repeated) -> Iterator[str]:
    item = turn.item
    nodes = item.nodes_of(turn.microbatch) if isinstance(item, Chunk) else item.nodes
    own = {tensor.name for node in nodes for tensor in node.outputs}
    for node in nodes:
        for tensor in node.inputs:
            if tensor.name not in own:
                yield repeated.name(tensor.name, turn.microbatch)


def _writes(turn: Turn, repeated: Repeated) -> Iterator[str]:
    item = turn.item
    nodes = item.nodes_of(turn.microbatch) if isinstance(item, Chunk) else item.nodes
    for node in nodes:
        for tensor in node.outputs:
            yield repeated.name(tensor.name, turn.microbatch)


class _Play:
    """The clocks of all meshes while turns are taken.

    taken  the numbers of the turns in the order in which they begin
    """

    def __init__(
        self,
        turns: _Turns,
        takes: Mapping[int, float],
        limits: Mapping[Site, int],
        outward: Collection[int],
        has_wires: bool = False,
    ) -> None:
        """`has_wires`: messages of a mesh go one after the other; else all that are ready at once."""
        self.turns = turns
        self.limits = limits
        self.outward = outward
        self.has_wires = has_wires
        self.seconds = [takes[id(turn.item)] for turn in turns.turns]
        self.missing = [len(before) for before in turns.before]
        self.ready_s = [0.0 for _ in turns.turns]
        self.free_s: dict[Site, float] = defaultdict(float)
        self.sent_s: dict[Site, float] = defaultdict(float)  # until when a mesh sends or receives
        self.waiting: dict[Site, set[int]] = defaultdict(set)
        self.under_way: dict[Site, set[int]] = defaultdict(set)  # micro-batches that were begun
        self.left: dict[tuple[Site, int], int] = defaultdict(
            int
        )  # heavy turns of a micro-batch still to come
        self.work_s: dict[Site, float] = defaultdict(float)  # of a mesh for one micro-batch
        self.is_heavy = self._weigh()
        self.begin_s: dict[int, float] = {}
        self.taken: list[int] = []
        self._take_all()

    def stop_s(self, number: int) -> float:
        """Return when a mesh is done with a turn."""
        return self.begin_s[number] + self.seconds[number]

    def _weigh(self) -> list[bool]:
        for turn, seconds in zip(self.turns.turns, self.seconds, strict=True):
            if isinstance(turn.item, Chunk) and turn.microbatch == 0:
                self.work_s[turn.item.site] += seconds
        heavy: list[bool] = []
        for turn, seconds in zip(self.turns.turns, self.seconds, strict=True):
            counts = isinstance(turn.item, Chunk) and turn.microbatch is not None
            heavy.append(counts and seconds >= LIGHT_SHARE * self.work_s[turn.item.site])  # type: ignore[union-attr]
            if heavy[-1]:
                self.left[turn.item.site, turn.microbatch] += 1  # type: ignore[union-attr,index]
        return heavy

    def _take_all(self) -> None:
        for number, missing in enumerate(self.missing):
            if not missing:
                self._arrive(number)
        while any(self.waiting.values()):
            self._take(*self._next())
        assert len(self.taken) == len(self.turns.turns), "turns wait for each other"

    def _arrive(self, number: int) -> None:
        """Let a turn wait for its mesh; a message begins at once."""
        item = self.turns.turns[number].item
        if isinstance(item, Communication):
            self.taken.append(number)
            self._finish(number, self._send(item, number))
        else:
            self.waiting[item.site].add(number)

    def _send(self, message: Communication, number: int) -> float:
        """Return when a message is there."""
        ends = _ends(message) if self.has_wires else ()
        there_s = max(self.ready_s[number], *(self.sent_s[site] for site in ends), 0.0) + self.seconds[number]
        self.sent_s.update(dict.fromkeys(ends, there_s))
        return there_s

    def _finish(self, number: int, at_s: float) -> None:
        for following in sorted(self.turns.after[number]):
            self.ready_s[following] = max(self.ready_s[following], at_s)
            self.missing[following] -= 1
            if not self.missing[following]:
                self._arrive(following)

    def _next(self) -> tuple[Site, int]:
        """Return the turn that begins first; where each mesh waits to be done with others, the lightest."""
        runnable = [(*choice, site) for site in self.waiting if (choice := self._choose(site)) is not None]
        if runnable:
            _, number, site = min(runnable)
            return site, number
        stuck = [(self.seconds[n], n, site) for site, numbers in self.waiting.items() for n in numbers]
        _, number, site = min(stuck)
        return site, number

    def _choose(self, site: Site) -> tuple[float, int] | None:
        """Return what a mesh does next, and when: of what is ready then, the first by rank."""
        allowed = [number for number in self.waiting[site] if self._may_begin(site, number)]
        if not allowed:
            return None
        begin_s = max(self.free_s[site], min(self.ready_s[number] for number in allowed))
        ready = [number for number in allowed if self.ready_s[number] <= begin_s]
        return begin_s, min(ready, key=self._rank)

    def _rank(self, number: int) -> tuple[bool, bool, bool, int, int]:
        """Rank what others wait for first, what goes out before what is back; of these, what is furthest."""
        turn, place = self.turns.turns[number], self.turns.places[number]
        if turn.microbatch is None:
            return True, False, False, place, number
        return False, not self.turns.leads[number], place not in self.outward, -place, number

    def _may_begin(self, site: Site, number: int) -> bool:
        microbatch, begun = self.turns.turns[number].microbatch, self.under_way[site]
        is_free = not self.is_heavy[number] or microbatch in begun
        return is_free or len(begun) < self.limits.get(site, inf)

    def _take(self, site: Site, number: int) -> None:
        self.waiting[site].remove(number)
        self.taken.append(number)
        self.begin_s[number] = max(self.free_s[site], self.ready_s[number])
        self.free_s[site] = self.stop_s(number)
        microbatch = self.turns.turns[number].microbatch
        if self.is_heavy[number] and microbatch is not None:
            self.under_way[site].add(microbatch)
            self.left[site, microbatch] -= 1
            if not self.left[site, microbatch]:
                self.under_way[site].remove(microbatch)
        self._finish(number, self.free_s[site])
