"""Find the quickest of all states by branch and bound over kinds (flexflow.txt, section 8.4).

Kinds are configured one after the other. A state in which some are is dropped where no step that it leads to
can be quicker than the best known (step_bound.py); what remains when all are configured is priced by the task
graph, from the lowest bound on, as A* takes them. Of states that symmetric workers make of each other one is
looked at.

Workers that may change places leave a step as long as it is: of such states one is priced.
A permutation of workers is a symmetry if devices are alike, hosts go to hosts, and routes over the network go
to routes of equal latency, lane by lane, each lane to one of equal rate.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

import numpy as np
import numpy.typing as npt

from partc.compiler.search.operators.own_space import Kinds
from partc.compiler.search.operators.step_bound import States, StepBound
from partc.compiler.search.operators.walk_tasks import StepConfigs
from partc.compiler.task_graphs.step_tasks import StepTasks
from partc.compiler.task_graphs.task_prices import TaskPrices
from partc.runtime.errors import BadUsage

Permutation = tuple[int, ...]  # worker -> the one in its place
MOST_STATES = 20_000_000
CHUNK = 20_000  # states that are bounded at once

Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Exhaustion:
    """The quickest state so far. `is_proven`: all were looked at, `priced` of them by the task graph."""

    state: StepConfigs
    step_s: float
    is_proven: bool = False
    priced: int = 0


def check_states(kinds: Kinds, most: int = MOST_STATES) -> None:
    """Raise BadUsage where there are too many states to look at."""
    states = prod(map(len, kinds.configs))
    if states > most:
        raise BadUsage(
            f"{states:.1e} states of {len(kinds.configs)} kinds of operators; at most {most:.0e} are tried",
            at="--method exhaustive",
            fix="use a cluster of fewer workers, or --method mcmc",
        )


def exhaust(
    tasks: StepTasks,
    kinds: Kinds,
    start: StepConfigs,
    go_on: Callable[[], bool] = lambda: True,
    show: Callable[[Exhaustion], None] = lambda best: None,
) -> Exhaustion:
    """Return the quickest of all states, or of those that were looked at while `go_on` allowed it.

    `start`: a state that can be; the quicker it is, the fewer are looked at. `show` is told of quicker ones.
    """
    step_s = tasks.begin(start)
    assert step_s is not None, "a start that can be"
    best = Exhaustion(start, step_s)
    bound, alike = StepBound(tasks, kinds), AlikeStates(kinds, symmetries_of(tasks.prices))
    unknown = np.array([[len(configs) for configs in kinds.configs]], np.int16)
    waiting: list[tuple[int, States]] = [(0, unknown)]
    while waiting:
        depth, states = waiting.pop()
        if depth == len(kinds.configs):
            if not _price(tasks, kinds, states, bound(states), best, go_on, show):
                return best
            continue
        if not go_on():
            return best
        following = np.repeat(states, len(kinds.configs[depth]), axis=0)
        following[:, depth] = np.tile(np.arange(len(kinds.configs[depth])), len(states))
        following = following[bound(following) < best.step_s]
        following = following[alike.is_first(following, depth + 1)]
        pieces = [following[begin : begin + CHUNK // 32] for begin in range(0, len(following), CHUNK // 32)]
        waiting += [(depth + 1, piece) for piece in reversed(pieces)]
    best.is_proven = True
    return best


def _price(
    tasks: StepTasks,
    kinds: Kinds,
    states: States,
    bounds: npt.NDArray[np.float64],
    best: Exhaustion,
    go_on: Callable[[], bool],
    show: Callable[[Exhaustion], None],
) -> bool:
    """Price states, from the lowest bound on, and tell whether there was time for all.

    Those that differ in the last kind alone are priced one after the other: so little changes between them.
    """
    last_groups = kinds.groups[-1]
    together: dict[bytes, list[int]] = {}
    for number in np.argsort(bounds, kind="stable").tolist():
        together.setdefault(states[number, :-1].tobytes(), []).append(number)
    for numbers in together.values():
        is_begun = False
        for number in numbers:
            if bounds[number] >= best.step_s:
                break
            if not go_on():
                return False
            state = kinds.state(tuple(states[number].tolist()))
            best.priced += 1
            if is_begun:
                step_s = tasks.move({group: state[group] for group in last_groups}, best.step_s)
            else:
                step_s = tasks.begin(state)
            if step_s is not None and step_s < best.step_s and not tasks.exceeds_memory:
                best.state, best.step_s = state, step_s
                show(best)
            elif is_begun and step_s is not None:
                tasks.undo()
            is_begun = True
    return True


class AlikeStates:
    """Tells states that symmetric workers make of earlier ones."""

    def __init__(self, kinds: Kinds, symmetries: Sequence[Permutation]) -> None:
        numbers = [{config: number for number, config in enumerate(own)} for own in kinds.configs]
        self._images = [  # by symmetry and kind: configuration -> what it becomes, -1: none of the space
            [
                np.array([own.get(config.moved(permutation), -1) for config in own] + [len(own)], np.int16)
                for own in numbers
            ]
            for permutation in symmetries
        ]

    def is_first(self, states: States, depth: int) -> Bools:
        """Tell which states no symmetry makes of a lesser one, whose first kinds, `depth` of them, are known.

        What follows an image must be in the space as well, else nothing is left out for it.
        """
        first = np.ones(len(states), bool)
        for images in self._images:
            if any(image.min() < 0 for image in images[depth:]):
                continue
            undecided, is_less = np.ones(len(states), bool), np.zeros(len(states), bool)
            is_inside = np.ones(len(states), bool)
            for kind in range(depth):
                own, other = states[:, kind], images[kind][states[:, kind]]
                is_inside &= other >= 0
                is_less |= undecided & (other < own)
                undecided &= other == own
            first &= ~(is_inside & is_less)
        return first


ALL_UP_TO = 6  # workers: of more, only exchanges of two, and of two hosts, are tried


def symmetries_of(prices: TaskPrices) -> list[Permutation]:
    """Return permutations that are symmetries, without the one that changes nothing."""
    workers = len(prices.workers)
    identity = tuple(range(workers))
    tried = permutations(identity) if workers <= ALL_UP_TO else _exchanges(prices)
    return [
        permutation for permutation in tried if permutation != identity and _is_symmetry(prices, permutation)
    ]


def _exchanges(prices: TaskPrices) -> Iterator[Permutation]:
    identity = list(range(len(prices.workers)))
    members: dict[str, list[int]] = {}
    for worker, host in enumerate(prices.hosts):
        members.setdefault(host, []).append(worker)
    pairs = [([a], [b]) for a in identity for b in identity[:a]]
    pairs += [(a, b) for a in members.values() for b in members.values() if a < b and len(a) == len(b)]
    for ours, theirs in pairs:
        permutation = identity.copy()
        for a, b in zip(ours, theirs, strict=True):
            permutation[a], permutation[b] = b, a
        yield tuple(permutation)


def _is_symmetry(prices: TaskPrices, permutation: Permutation) -> bool:
    network, workers = prices.network, prices.workers
    hosts: dict[str, str] = {}
    lanes: dict[object, object] = {}
    computing = {device.name: device.rates for host in prices.cluster.hosts for device in host.devices}
    likeness = [(computing[worker.device], worker.kind, worker.threads) for worker in workers]
    for worker, other in enumerate(permutation):
        alike = (
            likeness[worker] == likeness[other] and prices.limits_bytes[worker] == prices.limits_bytes[other]
        )
        if not alike or hosts.setdefault(prices.hosts[worker], prices.hosts[other]) != prices.hosts[other]:
            return False
    for a, b in permutations(range(len(workers)), 2):
        here = network.route(workers[a].device, workers[b].device)
        there = network.route(workers[permutation[a]].device, workers[permutation[b]].device)
        if here.latency_s != there.latency_s or len(here.lanes) != len(there.lanes):
            return False
        for lane, image in zip(here.lanes, there.lanes, strict=True):
            rates = (network.bytes_per_s[network.lane_number[each]] for each in (lane, image))
            if lanes.setdefault(lane, image) != image or len(set(map(float, rates))) > 1:
                return False
    return len(set(lanes.values())) == len(lanes)
