"""Walk over the configurations of operator groups, priced by the task graph.

Markov chain Monte Carlo as in flexflow.txt, section 6.2: from each start a walk of its own, by turns.
Beyond it walks cool down, change single groups in their second half alone, and every few turns the slowest
goes on from where the quickest has come (docs/decisions/057-walks-cool-down.md).
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from operator import itemgetter

import numpy as np

from partc.compiler.planning.stopwatch import paused_collection
from partc.compiler.task_graphs.step_tasks import StepTasks
from partc.passes.search.operators.grouped_step import GroupedStep
from partc.passes.search.operators.operator_space import OperatorConfig, OperatorSpace, data_parallel_config

# Temperatures, as shares of the quickest step that is known, so that they mean the same for any model.
HOTTEST, COLDEST = 0.03, 0.003
# Of proposals: those for a single group and for a family; others are for a kind, and perhaps neighbours.
SINGLE_SHARE, FAMILY_SHARE = 0.2, 0.1
ONE_MORE = 0.5  # how probable one more neighbour is
USED_SHARE = 0.5  # of proposals: those on the workers of another group
# Of all proposals those that are near what a kind has, and of these the ones that keep its degrees.
NEAR_SHARE, MOVED_SHARE = 0.7, 0.4
BEST_KEPT = 16
TURN = 50  # proposals of a walk
ALONE_SHARE = 0.4  # of the time: before that walks do not follow each other
FOLLOWING = 3  # turns, then the slowest walk goes on from where another one has come
LEAST_GAIN = 1e-6  # of a step: less is rounding

StepConfigs = tuple[OperatorConfig, ...]  # by group


@dataclass
class BestStates:
    """The best states that walks came upon, by seconds of a step."""

    seconds: dict[StepConfigs, float] = field(default_factory=dict)

    @property
    def least_s(self) -> float:
        """Return the shortest step."""
        return min(self.seconds.values(), default=float("inf"))

    def add(self, state: StepConfigs, step_s: float) -> None:
        """Note a state, if it is among the best."""
        if len(self.seconds) < BEST_KEPT or step_s < max(self.seconds.values()):
            self.seconds[state] = step_s
            if len(self.seconds) > BEST_KEPT:
                del self.seconds[max(self.seconds, key=self.seconds.__getitem__)]

    def add_all(self, other: "BestStates") -> None:
        """Note what others came upon."""
        for state, step_s in other.seconds.items():
            self.add(state, step_s)

    def in_order(self) -> list[StepConfigs]:
        """Return them from the quickest on."""
        return sorted(self.seconds, key=self.seconds.__getitem__)


class TaskWalk:
    """A walk from one start. `proposals` counts what was tried, `refused` what could not be.

    found    the quickest state that is quicker than where it began, or began anew, and that one's step
    """

    def __init__(self, tasks: StepTasks, space: OperatorSpace, best: BestStates, start: StepConfigs) -> None:
        self._tasks = tasks
        self._space = space
        self._near = near_kinds(tasks.step, space)
        self._best = best
        self._state = list(start)
        self.step_s = tasks.begin(start)
        self.found: tuple[StepConfigs, float] | None = None
        self._least_s = math.inf if self.step_s is None else self.step_s
        self.proposals = self.refused = 0
        if self.step_s is not None:
            best.add(start, self.step_s)

    def advance(
        self,
        rng: np.random.Generator,
        count: int,
        temperature: float = HOTTEST,
        single_share: float = SINGLE_SHARE,
    ) -> None:
        """Try proposals; the task graph has this walk's state before and after.

        `single_share`: of proposals, those for one group of a kind.
        """
        assert self.step_s is not None, "a start that can be"
        for _ in range(count):
            self.proposals += 1
            changes = self._propose(rng, single_share)
            limit_s = highest_accepted(self.step_s, self._best.least_s, temperature, rng)
            step_s = self._tasks.move(changes, limit_s) if changes else None
            if step_s is None:
                self.refused += 1
            elif step_s > limit_s:
                self._tasks.undo()
            else:
                self.step_s = step_s
                for number, config in changes.items():
                    self._state[number] = config
                if step_s < self._least_s * (1 - LEAST_GAIN):
                    self.found, self._least_s = (tuple(self._state), step_s), step_s
                if step_s < self._best.least_s * (1 + 1e-3):
                    self._best.add(tuple(self._state), step_s)

    def resume(self) -> None:
        """Give the task graph this walk's state again."""
        self._tasks.begin(self._state)

    def follow(self, state: StepConfigs, step_s: float) -> None:
        """Go on from another state, whose step is known, once this walk is resumed."""
        self._state, self.step_s = list(state), step_s
        self.found, self._least_s = None, step_s

    def _propose(self, rng: np.random.Generator, single_share: float) -> Mapping[int, OperatorConfig]:
        proposed = self._near_by(rng) if rng.random() < NEAR_SHARE else self._anywhere(rng, single_share)
        return {group: own for group, own in proposed.items() if self._state[group] != own}

    def _anywhere(self, rng: np.random.Generator, single_share: float) -> Mapping[int, OperatorConfig]:
        """Return any configuration for a group, a family, or a kind and some that exchange tensors."""
        share = rng.random()
        number, config = self._space.draw(rng, self._used(rng) if rng.random() < USED_SHARE else None)
        kind = self._space.kinds[number]
        if share < single_share and not self._space.is_alike:
            return {int(rng.choice(kind.groups)): config}
        if single_share <= share < single_share + FAMILY_SHARE:
            return dict.fromkeys(kind.family, config)
        return self._fitted(dict.fromkeys(self._joined(number, rng, self._near), config))

    def _near_by(self, rng: np.random.Generator) -> Mapping[int, OperatorConfig]:
        """Return other workers or degrees for a kind, and for those that exchange tensors with it there.

        They move with the degrees that each has, or get others on the same workers, half or twice as many.
        """
        number = int(rng.integers(len(self._space.kinds)))
        present = self._of_kind(number)
        here = frozenset(
            other for other in range(len(self._near)) if self._of_kind(other).workers == present.workers
        )
        joined = self._joined(number, rng, [others & here for others in self._near])
        if rng.random() >= MOVED_SHARE:
            workers = self._space.resized(rng, present.workers)
            return self._fitted(dict.fromkeys(joined, self._space.draw_config(rng, number, workers)))
        workers = self._used(rng) if rng.random() < USED_SHARE else present.workers
        if workers == present.workers or len(workers) != len(present.workers):
            workers = self._space.draw_workers(rng, len(present.workers))
        return self._fitted({kind: replace(self._of_kind(kind), workers=workers) for kind in joined})

    def _of_kind(self, kind: int) -> OperatorConfig:
        return self._state[self._space.kinds[kind].groups[0]]

    def _used(self, rng: np.random.Generator) -> tuple[int, ...]:
        """Return the workers of some group."""
        return self._state[rng.integers(len(self._state))].workers

    def _joined(self, kind: int, rng: np.random.Generator, near: Sequence[frozenset[int]]) -> list[int]:
        """Return a kind and, one time in two each, one more that is near those so far."""
        chosen = [kind]
        while rng.random() < ONE_MORE:
            others = sorted({other for own in chosen for other in near[own]}.difference(chosen))
            if not others:
                break
            chosen.append(others[int(rng.integers(len(others)))])
        return chosen

    def _fitted(self, configs: Mapping[int, OperatorConfig]) -> dict[int, OperatorConfig]:
        """Return by group what kinds are to have, fitted to each, as far as it can be."""
        fitted = {kind: self._space.fitted(kind, config) for kind, config in configs.items()}
        return {
            group: config
            for kind, config in fitted.items()
            if config is not None
            for group in self._space.kinds[kind].groups
        }


def near_kinds(step: GroupedStep, space: OperatorSpace) -> tuple[frozenset[int], ...]:
    """Return for each kind those whose operators it exchanges tensors with."""
    kind_of = {group: number for number, kind in enumerate(space.kinds) for group in kind.groups}
    near: list[set[int]] = [set() for _ in space.kinds]
    for tensor, readers in step.readers.items():
        if tensor in step.maker:
            made_by = kind_of[step.maker[tensor][0]]
            for group, _ in readers:
                near[made_by].add(kind_of[group])
                near[kind_of[group]].add(made_by)
    return tuple(frozenset(others - {number}) for number, others in enumerate(near))


def random_state(
    tasks: StepTasks, space: OperatorSpace, start: StepConfigs, rng: np.random.Generator, moves: int
) -> StepConfigs:
    """Return what kinds' random configurations lead to; those that cannot be are left out."""
    state = list(start)
    tasks.begin(state)
    for _ in range(moves):
        kind, config = space.draw(rng)
        changes = dict.fromkeys(space.kinds[kind].groups, config)
        if tasks.move(changes) is not None:
            for number in changes:
                state[number] = config
    return tuple(state)


def fewer_replicas(tasks: StepTasks, space: OperatorSpace) -> StepConfigs:
    """Return the quickest state in which the samples alone are divided, by all groups alike."""
    groups = range(len(tasks.step.groups))
    best, least_s = (data_parallel_config(1),) * len(groups), float("inf")
    tasks.begin(best)
    for config in space.replicas():
        step_s = tasks.move(dict.fromkeys(groups, config), least_s)
        if step_s is not None and step_s < least_s:
            best, least_s = (config,) * len(groups), step_s
    return best


def kinds_apart(tasks: StepTasks, space: OperatorSpace) -> StepConfigs | None:
    """Return the quickest state with kinds on different workers, dealt in turn, and samples divided alike.

    None where no workers are left over: all that divide the samples have all kinds.
    """
    best, least_s = None, float("inf")
    for workers in space.disjoint():
        configs = [OperatorConfig((("batch", len(own)),), own) for own in workers]
        state = [configs[0]] * len(tasks.step.groups)
        for number, kind in enumerate(space.kinds):
            for group in kind.groups:
                state[group] = configs[number % len(configs)]
        step_s = tasks.begin(state)
        if step_s is not None and step_s < least_s:
            best, least_s = tuple(state), step_s
    return best


def climb(
    tasks: StepTasks, space: OperatorSpace, start: StepConfigs, until_s: float, most: float = float("inf")
) -> tuple[StepConfigs, float, bool]:
    """Take every quicker configuration of a kind, or of one group of it, until none is left.

    It ends before that when the time is over, or when `most` configurations were tried. Returns the state,
    the seconds of its step, and whether no other configuration of any one kind or group is quicker.
    """
    state, step_s = list(start), tasks.begin(start)
    assert step_s is not None, "a start that can be"
    units = units_of(space)
    since_better = tried = 0
    for kind, groups in cycle(units):
        if since_better == len(units):
            return tuple(state), step_s, True
        since_better += 1
        for config in dict.fromkeys(space.configs(kind)):
            if tried >= most or time.monotonic() > until_s:
                return tuple(state), step_s, False
            tried += 1
            changes = {n: config for n in groups if state[n] != config}
            found_s = tasks.move(changes, step_s) if changes else None
            if found_s is None:
                continue
            if found_s < step_s * (1 - LEAST_GAIN):
                step_s, since_better = found_s, 0
                for number in changes:
                    state[number] = config
            else:
                tasks.undo()
    raise AssertionError("there is a kind")


def units_of(space: OperatorSpace) -> list[tuple[int, tuple[int, ...]]]:
    """Return the groups that are changed together: those of each kind, and each alone; with the kind."""
    units = [(number, kind.groups) for number, kind in enumerate(space.kinds)]
    if not space.is_alike:
        units += [(number, (one,)) for number, groups in units if len(groups) > 1 for one in groups]
    return units


@paused_collection()
def walk_tasks(
    tasks: StepTasks,
    space: OperatorSpace,
    starts: Sequence[StepConfigs],
    best: BestStates,
    rng: np.random.Generator,
    until_s: float,
    show: Callable[[float], None] = lambda step_s: None,
    most: float = float("inf"),
) -> int:
    """Walk until a time or `most` proposals; return how many were tried.

    `best`: takes the best states, where whoever interrupts a walk finds them.
    """
    walks = [walk for start in starts if (walk := TaskWalk(tasks, space, best, start)).step_s is not None]
    begun_s, least_s = time.monotonic(), best.least_s
    turns = tried = 0
    while walks and (progress := _progress(begun_s, until_s, tried, most)) < 1:
        singles = SINGLE_SHARE if progress >= 0.5 else 0.0
        for walk in walks:
            walk.resume()
            walk.advance(rng, TURN, cooled(progress), singles)
        turns += 1
        tried = TURN * turns * len(walks)
        if best.least_s < least_s:
            least_s = best.least_s
            show(least_s)
        if turns % FOLLOWING == 0 and progress >= ALONE_SHARE:
            _follow(walks)
    return tried


def _follow(walks: Sequence[TaskWalk]) -> None:
    """Let the slowest walk go on from the quickest state to which one has led from a slower one.

    However quick a start is, if no proposal was quicker its walk has come nowhere: others would not either.
    """
    leading = [walk.found for walk in walks if walk.found is not None]
    if leading:
        state, step_s = min(leading, key=itemgetter(1))
        max(walks, key=lambda walk: (walk.found is None, walk.step_s)).follow(state, step_s)


def _progress(begun_s: float, until_s: float, tried: int, most: float) -> float:
    """Return the share of a walk that is over, by its time or its proposals."""
    now_s = time.monotonic()
    by_time = (now_s - begun_s) / (until_s - begun_s) if until_s > now_s else 1.0
    return max(by_time, tried / most)


def cooled(progress: float) -> float:
    """Return the temperature after a share of a walk, falling geometrically (Kirkpatrick et al. 1983)."""
    return HOTTEST * math.pow(COLDEST / HOTTEST, progress)


def highest_accepted(cost: float, best: float, temperature: float, rng: np.random.Generator) -> float:
    """Return the highest cost at which a proposal is taken: one dearer by d with probability exp(-d / T).

    T is the temperature's share of the best cost.
    """
    return cost - temperature * best * math.log(1.0 - rng.random())
