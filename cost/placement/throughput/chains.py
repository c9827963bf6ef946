"""The best chain of parts, by dynamic programming over downsets, layer by layer of devices used.

A contiguous answer is a chain of downsets {} = I0 < I1 < ... < Im of the forward groups, a device for each
step:

    f(0, {}) = 0        f(d + 1, J) = min over I < J, kind of device: max(f(d, I), load(J - I))

Only values below `limit` are kept, and only downsets whose remaining work the remaining devices can hold,
so the result is either the best chain below the limit or the proof that there is none. Enumerated in whole
ticks, it is exact.

Source: the dynamic program of Tarnawski and others, NeurIPS 2020, section 4; the pruning is ours.
"""

import time
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from partc.cost.placement.problems.groups import NEVER, Groups, Ints, flat
from partc.cost.placement.throughput.chain_kernel import LIMIT, extend_layer

MOST_STATES = 1 << 21
STEPS_PER_CALL = 40_000_000


@dataclass(frozen=True)
class Chain:
    """`value` in ticks: the best below the limit; None: there is none, where `complete`.

    `parts`: (is on a CPU, groups) in order; free groups are in none.
    """

    value: int | None
    parts: tuple[tuple[bool, tuple[int, ...]], ...]
    complete: bool
    states: int


@dataclass
class _Layer:
    keys: "np.typing.NDArray[np.uint64]"
    values: Ints
    parents: Ints
    on_cpu: Ints
    table: Ints
    filled: int

    @classmethod
    def empty(cls, capacity: int, words: int) -> "_Layer":
        return cls(
            np.zeros((capacity, words), np.uint64),
            np.zeros(capacity, np.int64),
            np.zeros(capacity, np.int64),
            np.zeros(capacity, np.int64),
            np.full(4 * capacity, -1, np.int64),
            0,
        )

    def trimmed(self) -> "_Layer":
        n = self.filled
        none = np.zeros(0, np.int64)
        return _Layer(
            self.keys[:n].copy(),
            self.values[:n].copy(),
            self.parents[:n].copy(),
            self.on_cpu[:n].copy(),
            none,
            n,
        )


def best_chain(groups: Groups, limit: int, *, deadline_s: float) -> Chain:
    """Find the best chain of a value below `limit` ticks, until `deadline_s` of the monotonic clock."""
    if not 0 < limit < NEVER:
        return Chain(None, (), limit <= 0, 0)
    form = _form(groups)
    words = (len(form.groups) + 63) // 64 + 1
    layer = _Layer.empty(4, words)
    layer.filled = 1
    layers, best, last, states = [layer], limit, (-1, -1), 1
    for number in range(groups.problem.devices):
        filled, best, index = _extend(form, groups, layers[-1], number, best, words, deadline_s)
        if filled is None:
            return Chain(None, (), False, states)
        if index >= 0:
            last = (number + 1, index)
        layers.append(filled)
        states += filled.filled
        if filled.filled == 0:
            break
    if last[0] < 0:
        return Chain(None, (), True, states)
    return Chain(best, _parts(layers, last, form.groups), True, states)


def _extend(
    form: "_Form", groups: Groups, layer: _Layer, number: int, best: int, words: int, deadline_s: float
) -> tuple[_Layer | None, int, int]:
    capacity = max(1 << 12, 1 << (2 * layer.filled).bit_length())
    problem = groups.problem
    while capacity <= MOST_STATES:
        out, last_index, first, chunk, limit = _Layer.empty(capacity, words), -1, 0, 16, best
        while first < layer.filled:
            if time.monotonic() > deadline_s:
                return None, best, -1
            last = min(first + chunk, layer.filled)
            filled, limit, steps, index = extend_layer(  # arrays of a fixed number
                layer.keys, layer.values, first, last,
                out.keys, out.values, out.parents, out.on_cpu, out.table, out.filled,
                *form.arrays, limit, (problem.accelerators, problem.cpus), groups.memory,
                form.most_work_on_cpu(limit), int(form.owed.sum()), number, STEPS_PER_CALL,
            )  # fmt: skip
            if steps < 0:
                return None, best, -1
            if filled < 0:
                break
            out.filled = filled
            last_index = index if index >= 0 else last_index
            first = last
            chunk = max(1, min(4096, int(chunk * 2_000_000 / max(steps, 1_000)) + 1))
        else:
            return out.trimmed(), limit, last_index
        capacity *= 4
    return None, best, -1


def _parts(
    layers: list[_Layer], last: tuple[int, int], group_numbers: tuple[int, ...]
) -> tuple[tuple[bool, tuple[int, ...]], ...]:
    number, index = last
    parts = []
    while number > 0:
        layer = layers[number]
        parent = int(layer.parents[index])
        here, there = (_bits(source.keys[i]) for source, i in ((layer, index), (layers[number - 1], parent)))
        members = tuple(g for i, g in enumerate(group_numbers) if (here & ~there) >> i & 1)
        parts.append((bool(layer.on_cpu[index]), members))
        number, index = number - 1, parent
    return tuple(reversed(parts))


def _bits(key: "np.typing.NDArray[np.uint64]") -> int:
    return sum(int(word) << 64 * i for i, word in enumerate(key[:-1]))


@dataclass(frozen=True)
class _Form:
    """The kernel's arrays: forward groups renumbered, families divided between the free groups in them."""

    groups: tuple[int, ...]
    owed: Ints
    cpu: Ints
    arrays: tuple[Ints, ...]

    def most_work_on_cpu(self, limit: int) -> int:
        """Bound the accelerator work that a CPU can take over within a load below `limit`."""
        free = int(self.owed[self.cpu == 0].sum())
        busy = self.cpu > 0
        if not busy.any():
            return free
        ratio = max(Fraction(int(w), int(c)) for w, c in zip(self.owed[busy], self.cpu[busy], strict=True))
        return free + int(ratio * limit) + 1


def _form(groups: Groups) -> _Form:
    forward = tuple(g for g in range(groups.count) if groups.forward[g])
    number = {group: i for i, group in enumerate(forward)}
    free = {group: i for i, group in enumerate(g for g in range(groups.count) if not groups.forward[g])}
    families: list[tuple[tuple[int, ...], int, int]] = []
    for family, cost in zip(groups.families, groups.costs, strict=True):
        inner = tuple(number[group] for group in family if group in number)
        outer = [free[group] for group in family if group in free]
        if inner and outer:
            # A cut of the rest with one of them is a cut of the whole: shares of the cost bound it.
            families += [(inner, int(cost) // len(outer), o) for o in outer]
        elif len(inner) > 1:
            families.append((inner, int(cost), -1))
    touching: list[list[int]] = [[] for _ in forward]
    free_cost = np.zeros(len(free), np.int64)
    for f, (inner, cost, o) in enumerate(families):
        for group in inner:
            touching[group].append(f)
        if o >= 0:
            free_cost[o] += cost
    before = [[number[b] for b in groups.before[group]] for group in forward]
    after: list[list[int]] = [[] for _ in forward]
    for group, earlier in enumerate(before):
        for b in earlier:
            after[b].append(group)
    chosen = np.array(forward, np.int64)
    work = groups.work[chosen]
    owed = np.where(work >= NEVER, 0, work)
    cpu = groups.cpu[chosen]
    arrays = (
        work,
        owed,
        cpu,
        groups.size[chosen],
        np.array([len(b) for b in before], np.int64),
        *flat(tuple(map(tuple, after))),
        *flat(tuple(map(tuple, touching))),
        np.array([len(inner) for inner, _, _ in families], np.int64),
        np.array([cost for _, cost, _ in families], np.int64),
        np.array([o for _, _, o in families], np.int64),
        np.array([min(int(groups.work[g]), int(groups.cpu[g])) for g in free], np.int64),
        free_cost,
    )
    return _Form(forward, owed, cpu, arrays)


assert LIMIT == NEVER
