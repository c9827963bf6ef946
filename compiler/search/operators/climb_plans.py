"""Take single changes that are quicker as whole plans, from what the task graph calls quickest on."""

import time
from collections.abc import Callable, Iterable, Iterator

from partc.compiler.search.operators.walk_tasks import StepConfigs, units_of
from partc.compiler.task_graphs.step_tasks import StepTasks
from partc.passes.search.operators.operator_space import OperatorConfig, OperatorSpace

GroupChange = tuple[tuple[int, ...], OperatorConfig]  # groups, and what they are configured to


def all_changes(space: OperatorSpace) -> Iterator[GroupChange]:
    """Yield every configuration of a kind, and of each group of it alone."""
    for kind, groups in units_of(space):
        for config in dict.fromkeys(space.configs(kind)):
            yield groups, config


def climb_plans(
    tasks: StepTasks,
    changes: Callable[[], Iterable[GroupChange]],
    start: StepConfigs,
    is_quicker: Callable[[StepConfigs], bool],
    goes_on: Callable[[int], bool],
    until_s: float,
) -> bool:
    """Take changes as long as one is quicker. `changes` yields those that any state may have.

    `is_quicker` prices a state, and keeps it where it is the quickest; `goes_on` is asked before, with how
    many were priced. Returns whether all changes of the last state were: none is quicker.
    """
    tried, state = set[StepConfigs](), start
    while (changed_states := single_changes(tasks, changes(), state, until_s)) is not None:
        for changed in changed_states:
            if changed in tried:
                continue
            if not goes_on(len(tried)):
                return False
            tried.add(changed)
            if is_quicker(changed):
                state = changed
                break
        else:
            return True
    return False


def single_changes(
    tasks: StepTasks, changes: Iterable[GroupChange], start: StepConfigs, until_s: float
) -> list[StepConfigs] | None:
    """Return what each change makes of a state: the quickest first.

    None where the time is over before all are known.
    """
    if tasks.begin(start) is None:
        return []
    step_s_of: dict[StepConfigs, float] = {}
    for groups, config in changes:
        if time.monotonic() > until_s:
            return None
        moved = {n: config for n in groups if start[n] != config}
        step_s = tasks.move(moved) if moved else None
        if step_s is not None:
            step_s_of[tuple(moved.get(n, own) for n, own in enumerate(start))] = step_s
            tasks.undo()
    return sorted(step_s_of, key=step_s_of.__getitem__)
