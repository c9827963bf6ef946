"""Walk over the configurations of operator groups, one kind or one group at a time, priced by the task graph.

Markov chain Monte Carlo as in flexflow.txt, section 6.2: from each start a walk of its own, by turns.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

from partc.compiler.planning.step_tasks import StepTasks
from partc.passes.search.metropolis import highest_accepted
from partc.passes.search.operator_space import OperatorConfig, OperatorSpace

SINGLE_SHARE = 0.3  # of proposals: those for one group, where its kind has several
EVERYTHING_SHARE = 0.03  # of proposals: those that bring all groups to the same workers
BEST_KEPT = 16
LEAST_GAIN = 1e-6  # of a step: less is rounding

State = tuple[OperatorConfig, ...]  # by group


@dataclass
class BestStates:
    """The best states that walks came upon, by seconds of a step."""

    found: dict[State, float] = field(default_factory=dict)

    @property
    def least_s(self) -> float:
        """Return the shortest step."""
        return min(self.found.values(), default=float("inf"))

    def add(self, state: State, step_s: float) -> None:
        """Note a state, if it is among the best."""
        if len(self.found) < BEST_KEPT or step_s < max(self.found.values()):
            self.found[state] = step_s
            if len(self.found) > BEST_KEPT:
                del self.found[max(self.found, key=self.found.__getitem__)]

    def in_order(self) -> list[State]:
        """Return them from the quickest on."""
        return sorted(self.found, key=self.found.__getitem__)


class TaskWalk:
    """A walk from one start. `proposals` counts what was tried, `refused` what could not be."""

    def __init__(self, tasks: StepTasks, space: OperatorSpace, best: BestStates, start: State) -> None:
        self._tasks = tasks
        self._space = space
        self._best = best
        self._state = list(start)
        self.step_s = tasks.begin(start)
        self.proposals = self.refused = 0
        if self.step_s is not None:
            best.add(start, self.step_s)

    def advance(self, rng: np.random.Generator, count: int) -> None:
        """Try proposals; the task graph has this walk's state before and after."""
        assert self.step_s is not None, "a start that can be"
        for _ in range(count):
            self.proposals += 1
            changes = self._propose(rng)
            limit_s = highest_accepted(self.step_s, self._best.least_s, rng)
            step_s = self._tasks.move(changes, limit_s) if changes else None
            if step_s is None:
                self.refused += 1
            elif step_s > limit_s:
                self._tasks.undo()
            else:
                self.step_s = step_s
                for number, config in changes.items():
                    self._state[number] = config
                if step_s < self._best.least_s * (1 + 1e-3):
                    self._best.add(tuple(self._state), step_s)

    def resume(self) -> None:
        """Give the task graph this walk's state again."""
        self._tasks.begin(self._state)

    def _propose(self, rng: np.random.Generator) -> Mapping[int, OperatorConfig]:
        if rng.random() < EVERYTHING_SHARE:
            config = self._space.draw_replicas(rng)
            return {number: config for number, own in enumerate(self._state) if own != config}
        kind, config = self._space.draw(rng)
        groups = self._space.kinds[kind].groups
        if len(groups) > 1 and rng.random() < SINGLE_SHARE:
            groups = (int(rng.choice(groups)),)
        return {number: config for number in groups if self._state[number] != config}


def climb(tasks: StepTasks, space: OperatorSpace, start: State, until_s: float) -> tuple[State, float, bool]:
    """Take every quicker configuration of a kind until none is left, or the time is over.

    Returns the state, the seconds of its step, and whether no other configuration of any one kind is quicker.
    """
    state, step_s = list(start), tasks.begin(start)
    assert step_s is not None, "a start that can be"
    since_better, kinds = 0, len(space.kinds)
    for kind in cycle(range(kinds)):
        if since_better == kinds:
            return tuple(state), step_s, True
        since_better += 1
        for config in dict.fromkeys(space.configs(kind)):
            if time.monotonic() > until_s:
                return tuple(state), step_s, False
            changes = {n: config for n in space.kinds[kind].groups if state[n] != config}
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


def walk_tasks(
    tasks: StepTasks,
    space: OperatorSpace,
    starts: Sequence[State],
    rng: np.random.Generator,
    until_s: float,
    show: Callable[[float], None] = lambda step_s: None,
    turn: int = 50,
) -> tuple[BestStates, int]:
    """Return the best states, and how many proposals were tried.

    Walks end when the time is over, or when half of it has brought nothing.
    """
    best = BestStates()
    walks = [walk for start in starts if (walk := TaskWalk(tasks, space, best, start)).step_s is not None]
    patience_s = (until_s - time.monotonic()) / 2
    improved_s, least_s = time.monotonic(), best.least_s
    while walks and time.monotonic() < min(until_s, improved_s + patience_s):
        for walk in walks:
            walk.resume()
            walk.advance(rng, turn)
        if best.least_s < least_s:
            improved_s, least_s = time.monotonic(), best.least_s
            show(least_s)
    return best, sum(walk.proposals for walk in walks)
