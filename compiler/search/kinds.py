"""Operators that are configured together, and every configuration that they can have."""

from dataclasses import dataclass
from functools import cached_property

from partc.compiler.search.walk_tasks import State
from partc.compiler.task_graphs.step_tasks import StepTasks
from partc.passes.search.additive_costs import Choice
from partc.passes.search.operator_space import OperatorConfig, OperatorSpace


@dataclass(frozen=True)
class Kinds:
    """Groups that are configured together, by number, and the configurations that are looked at.

    left_out: how many configurations of the space are not
    """

    groups: tuple[tuple[int, ...], ...]
    configs: tuple[tuple[OperatorConfig, ...], ...]
    left_out: int = 0

    @cached_property
    def of_group(self) -> dict[int, int]:
        """Return the kind of each group."""
        return {group: kind for kind, groups in enumerate(self.groups) for group in groups}

    def state(self, choice: Choice) -> State:
        """Return the configuration of every group."""
        chosen = {
            g: self.configs[kind][choice[kind]] for kind in range(len(choice)) for g in self.groups[kind]
        }
        return tuple(chosen[group] for group in sorted(chosen))


def kinds_of_space(tasks: StepTasks, space: OperatorSpace) -> Kinds:
    """Return all kinds of a space, with every configuration that its groups can have."""
    groups = tuple(kind.groups for kind in space.kinds)
    configs = tuple(
        tuple(
            config
            for config in dict.fromkeys(space.configs(number))
            if all(tasks.placed(group, config) is not None for group in own)
        )
        for number, own in enumerate(groups)
    )
    return Kinds(groups, configs)
