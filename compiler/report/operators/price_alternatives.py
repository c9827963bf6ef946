"""What else each operator group could be, and what that would take: the search's prices, group by group.

    computing   the group's nodes on the way forward and back, and what its ranks sum meanwhile
    updating    its parameters' gradients, summed and brought to where they are kept, and the update
    memory      of its variables, on the device that keeps most

Other groups' tensors are taken to be there. Alike operators are priced once: on one device, and on all
of them in every way, simple ones first. Of a batch per replica there is nothing to choose: every worker is a
replica of the whole step.
"""

from dataclasses import replace

from partc.compiler.compilation import Compilation
from partc.compiler.report.operators.alternatives import Alternative, Alternatives, too_large
from partc.compiler.search.operators.own_space import OwnSpace
from partc.compiler.task_graphs.block_costs import BlockCosts
from partc.passes.layouts.strategy_meshes import BATCH
from partc.passes.search.operators.operator_space import OperatorConfig, SplitDegrees
from partc.passes.search.operators.read_configs import read_grids
from partc.runtime.errors import UnsupportedModel

PRICED = 40  # configurations of all operators together,
LEAST_PRICED, MOST_PRICED = 2, 6  # and of those that are alike
MOST_FAMILIES = 40

NO_OPERATOR = "The graph has no operator that a strategy configures."


def price_alternatives(compilation: Compilation) -> Alternatives:
    """Return what else every operator group of a small step could be."""
    own = OwnSpace.of(compilation)
    if own is None:
        return Alternatives((), NO_OPERATOR)
    families = len({kind.family for kind in own.space.kinds})
    if families > MOST_FAMILIES:
        return too_large(f"it has {families} kinds of operators", f"{MOST_FAMILIES} kinds")
    each = min(MOST_PRICED, max(LEAST_PRICED, PRICED // families))
    try:
        pricer = _GroupPricer(own)
    except UnsupportedModel as error:  # fewer samples than workers, which searches begin with
        return Alternatives((), f"Not priced: {error.what}.")
    lowered = compilation.lowered
    grids = read_grids(compilation.analysis, lowered.decisions, lowered.meshes, own.groups)
    of_groups: list[tuple[Alternative, ...]] = [()] * len(own.groups)
    priced: dict[object, tuple[Alternative, ...]] = {}
    for number, kind in enumerate(own.space.kinds):
        for group in kind.groups:
            current = grids[group].config
            key = kind.family, current
            if key not in priced:
                others = _candidates(own, number, each)
                priced[key] = _priced(pricer, kind.family[0], others, current)
            of_groups[group] = priced[key]
    return Alternatives(tuple(of_groups), "")


def _candidates(own: OwnSpace, number: int, most: int) -> list[OperatorConfig]:
    """Return a kind's configurations: on one device, samples on all, others of fewer dimensions first."""
    by_split: dict[SplitDegrees, OperatorConfig] = {}
    for config in own.space.configs(number):
        if len(config.workers) in (1, own.space.workers):
            by_split.setdefault(_plain(config.split), config)
    simple_first = sorted(by_split, key=lambda split: (len(split), all(name != BATCH for name, _ in split)))
    return [by_split[split] for split in simple_first[:most]]


def _priced(
    pricer: "_GroupPricer", group: int, candidates: list[OperatorConfig], current: OperatorConfig
) -> tuple[Alternative, ...]:
    own = pricer.price(group, current)
    others = (pricer.price(group, c) for c in candidates if _plain(c.split) != _plain(current.split))
    alternatives = [other for other in others if other is not None]
    if own is not None:
        alternatives.insert(0, replace(own, taken=True))
    return tuple(sorted(alternatives, key=lambda each: each.computing_s + each.updating_s))


def _plain(split: SplitDegrees) -> SplitDegrees:
    return tuple((dimension, parts) for dimension, parts in split if parts > 1)


class _GroupPricer:
    """Prices a group alone."""

    def __init__(self, own: OwnSpace) -> None:
        self._costs = BlockCosts(own.tasks)
        self._computing: dict[int, list[int]] = {}
        for number, block in self._costs.computing.items():
            self._computing.setdefault(block.group, []).append(number)

    def price(self, group: int, config: OperatorConfig) -> Alternative | None:
        """Return what a configuration takes, None where the group cannot be divided so."""
        if not self._costs.can_place(group, config):
            return None
        computing_s = sum(self._costs.compute(n, config).seconds for n in self._computing.get(group, ()))
        updating_s = memory_bytes = 0.0
        for number, update in self._costs.updates.items():
            own = [
                replace(parameter, terms=tuple(term for term in parameter.terms if term.group == group))
                for parameter in update.parameters
                if parameter.home == group
            ]
            if own:
                alone = self._costs.update(number, own, {group: config})
                updating_s += alone.seconds
                memory_bytes += float(alone.memory.max(initial=0.0))
        return Alternative(
            _plain(config.split), len(config.workers), computing_s, updating_s, memory_bytes, False
        )
