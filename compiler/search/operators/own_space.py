"""The space of operators' own configurations of a step, and what its states mean as strategies."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from partc.compiler.compilation import Compilation
from partc.compiler.planning.order_step import bucket_bytes
from partc.compiler.search.operators.walk_tasks import StepConfigs, fewer_replicas, kinds_apart
from partc.compiler.task_graphs.step_tasks import StepTasks
from partc.compiler.task_graphs.task_prices import TaskPrices
from partc.cost.strategy import MESH_STRATEGY_FORMAT, Batch, OpConfig, Strategy
from partc.passes.search.additive.additive_costs import ConfigNumbers
from partc.passes.search.operators.find_groups import OperatorGroup, find_groups
from partc.passes.search.operators.grouped_step import group_step
from partc.passes.search.operators.operator_space import (
    OperatorConfig,
    OperatorSpace,
    Together,
    data_parallel_config,
    kinds_of,
)
from partc.passes.search.operators.read_configs import read_configs


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

    def state(self, choice: ConfigNumbers) -> StepConfigs:
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


MOST_TOLD = 3  # operators whose change is told


@dataclass(frozen=True)
class OwnSpace:
    """A step's operator groups, what they may be configured to, and their task graph."""

    first: Compilation
    groups: tuple[OperatorGroup, ...]
    together: Together | None = None

    @staticmethod
    def of(first: Compilation, together: Together | None = None) -> "OwnSpace | None":
        """Return the space of a step; None where there is nothing to choose.

        A batch of each replica's own leaves nothing: all operators have all workers as replicas. So does a
        step that neither sums products nor reads a parameter other than point by point.
        """
        analysis = first.analysis
        groups = find_groups(analysis.training, analysis.facts, analysis.main)
        if analysis.per_replica or not groups:
            return None
        return OwnSpace(first, groups, together)

    @cached_property
    def tasks(self) -> StepTasks:
        """Return the task graph."""
        return make_tasks(self.first, self.groups)

    @cached_property
    def space(self) -> OperatorSpace:
        """Return what configurations may be drawn."""
        return space_of(self.first, self.groups, self.together)

    @cached_property
    def kinds(self) -> Kinds:
        """Return the kinds of operators, and all configurations of each."""
        return kinds_of_space(self.tasks, self.space)

    @property
    def states(self) -> int:
        """Return how many states there are, if all groups of a kind have one configuration."""
        return prod(map(len, self.kinds.configs))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the name of each kind: that of its first operator."""
        return tuple(self.groups[own[0]].node for own in self.kinds.groups)

    @property
    def alone(self) -> StepConfigs:
        """Return the state of everything on one worker."""
        return (OperatorConfig((("batch", 1),), (0,)),) * len(self.groups)

    def starts(self, best: Strategy | None = None) -> list[StepConfigs]:
        """Return where walks begin, alike ones side by side.

        Data parallelism, the best strategy so far, as few replicas as are quickest; everything on one worker,
        kinds apart.
        """
        starts = [fewer_replicas(self.tasks, self.space), self.alone]
        if best is not None and best.has_meshes:
            starts.insert(0, self.read(best))
        if self.space.samples % self.space.workers == 0:
            starts.insert(0, (data_parallel_config(self.space.workers),) * len(self.groups))
        apart = kinds_apart(self.tasks, self.space)
        return starts if apart is None else [*starts, apart]

    def read(self, strategy: Strategy) -> StepConfigs:
        """Return the state that comes closest to a strategy of meshes."""
        return read_configs(self.first.analysis, strategy, self.groups)

    def quickest(self, states: Sequence[StepConfigs]) -> StepConfigs:
        """Return the state of the shortest step, of those that can be."""
        step_s_of = {state: step_s for state in states if (step_s := self.tasks.begin(state)) is not None}
        return min(step_s_of, key=step_s_of.__getitem__)

    def strategy(self, state: StepConfigs) -> Strategy:
        """Return the strategy that a state is."""
        return strategy_of(state, self.groups, self.first.worker_names, "global")

    def describe(self, state: StepConfigs, before: StepConfigs | None) -> str:
        """Return in words what a state changes."""
        changed = [n for n, own in enumerate(state) if before is None or own != before[n]]
        words = [f"{self.groups[n].node} {_described(state[n])}" for n in changed[:MOST_TOLD]]
        more = len(changed) - len(words)
        return "; ".join(words) + (f"; {more} more" if more else "")


def _described(config: OperatorConfig) -> str:
    split = ", ".join(f"{name}={degree}" for name, degree in config.split if degree > 1) or "whole"
    return f"{split} on {','.join(map(str, config.workers[:4]))}{',...' * (len(config.workers) > 4)}"


def strategy_of(
    state: StepConfigs, groups: Sequence[OperatorGroup], worker_names: Sequence[str], batch: Batch
) -> Strategy:
    """Return the strategy that configures every group. `state`: a configuration by group, in their order."""
    entries = tuple(
        OpConfig(group.node, dict(config.split), devices=tuple(worker_names[w] for w in config.workers))
        for group, config in zip(groups, state, strict=True)
    )
    return Strategy(MESH_STRATEGY_FORMAT, batch, {}, ops=entries)


def make_tasks(first: Compilation, groups: Sequence[OperatorGroup]) -> StepTasks:
    """Return the task graph of a step's operator groups on its cluster."""
    step = group_step(first.analysis, groups)
    return StepTasks(step, TaskPrices(first.cluster, first.options.times), bucket_bytes(first.cluster))


def space_of(
    first: Compilation, groups: Sequence[OperatorGroup], together: Together | None = None
) -> OperatorSpace:
    """Return what configurations of a step's operator groups may be drawn."""
    analysis = first.analysis
    fed = analysis.training.data_inputs.values()
    sizes = [analysis.facts.shape(e.name)[e.sample_axis] for e in fed if e.sample_axis is not None]
    kinds = kinds_of(groups, together)
    return OperatorSpace(kinds, len(first.worker_names), min(sizes, default=1), together is not None)
