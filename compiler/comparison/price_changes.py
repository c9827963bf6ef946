"""Price changes of what is compiled: the plan as it is on other machines, and what compiling makes of them.

A change that is compiled anew is priced as `partc compile` with that input predicts it, to the digit: the
same decisions, lowered and scheduled alike, without the files.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from partc.compiler.comparison.list_changes import Change, batch_sizes, list_changes
from partc.compiler.comparison.price_in_processes import price_in_processes
from partc.compiler.comparison.price_plan import price_plan, price_timeline
from partc.compiler.compilation import Compilation
from partc.compiler.options import Options
from partc.compiler.pipeline import COMPILE, OUTLINE, run
from partc.compiler.planning.price_step import MANY_RANKS
from partc.compiler.report.choices.describe_mesh import describe_grid
from partc.compiler.report.methods import NAMES
from partc.compiler.search.decide_strategy import decide_strategy
from partc.cost.cluster.cluster import Cluster, ranks_of
from partc.cost.simulation.timeline import Measured
from partc.cost.what_if import WHAT_IF_FORMAT, PricedChange, PricedStep, WhatIf
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.errors import InputError, NoPlacement
from partc.runtime.log import silent_log

# Compiled anew are changes of so many nodes together, some two minutes on two cores; at least some.
COMPILED_NODES = 300_000
LEAST_COMPILED = 4
# As how many compilations of a strategy by its name: `auto` decides among several, searches take their time.
COMPILATIONS = {"auto": 6, "search": 40, "placed": 40}

ShowPriced = Callable[[int, int, str], None]  # changes done, of how many, and which is next


def show_nothing(done: int, total: int, following: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class PriceChanges:
    """Prices what `--what-if` lists. `read`: returns the graph anew; `options`: as they were asked for."""

    read: Callable[[], TrainingGraph]
    cluster: Cluster
    options: Options
    show: ShowPriced = show_nothing

    def __call__(self, compilation: Compilation) -> WhatIf:
        """Return the step of a compilation whose plan is simulated, and those of all changes."""
        plan, cluster = compilation.plan, compilation.machines
        changes = list_changes(cluster, compilation.options, compilation.training)
        compiled = set(self._compiled(changes, compilation))
        jobs = [partial(self._price, change, compilation, change in compiled) for change in changes]

        def show(done: int) -> None:
            following = changes[done] if done < len(changes) else None
            name = "" if following is None else f"{following.dimension} {following.value}".rstrip()
            self.show(done, len(changes), name)

        show(0)
        priced_changes = price_in_processes(jobs, show)
        price = price_timeline(plan, cluster, compilation.timeline)
        hosts, batch = (
            len(cluster.hosts),
            sum(batch_sizes(compilation.options, compilation.training).values()),
        )
        return WhatIf(
            WHAT_IF_FORMAT, price, describe_decisions(compilation), hosts, batch, tuple(priced_changes)
        )

    def _compiled(self, changes: list[Change], compilation: Compilation) -> Iterator[Change]:
        """Yield the changes that are compiled anew: the first ones, then the quick ones, then others."""
        left = COMPILED_NODES // max(1, len(compilation.training.graph.nodes))
        if len(ranks_of(self.cluster)) >= MANY_RANKS:
            left = 0
        open_ones = [change for change in changes if not change.reason]
        first, rest = open_ones[:LEAST_COMPILED], open_ones[LEAST_COMPILED:]
        yield from first
        left -= sum(map(self._compilations, first))
        for change in sorted(rest, key=self._compilations):
            left -= self._compilations(change)
            if left < 0:
                return
            yield change

    def _compilations(self, change: Change) -> int:
        """Return what compiling a change takes, in compilations of a strategy by its name."""
        try:
            _, options = change.apply(self.cluster, self.options)
        except InputError:  # which pricing it says
            return 1
        return COMPILATIONS.get(str(options.strategy), 1)

    def _price(self, change: Change, compilation: Compilation, is_compiled: bool) -> PricedChange:
        description = (change.dimension, change.value, change.meaning)
        if change.reason:
            return PricedChange(*description, not_priced=change.reason)
        same_plan: PricedStep | None = None
        try:
            cluster, options = change.apply(self.cluster, self.options)
            if change.keeps_plan:
                same_plan = price_plan(compilation.plan, cluster, Measured(kernels=compilation.options.times))
            if not is_compiled:
                return PricedChange(*description, same_plan=same_plan, not_priced=_left_out(change))
            with silent_log():
                price, decisions = self._compile(cluster, options)
        except (InputError, NoPlacement) as error:
            return PricedChange(*description, same_plan=same_plan, not_priced=error.what)
        return PricedChange(*description, same_plan=same_plan, compiled=price, decisions=decisions)

    def _compile(self, cluster: Cluster, options: Options) -> tuple[PricedStep, str]:
        """Return the price of what compiling makes of an input, and what is decided. Raises PartcError."""
        compilation = decide_strategy(self.read, cluster, options, COMPILE)
        run((OUTLINE,), compilation)
        price = price_plan(compilation.plan, cluster, Measured(kernels=compilation.options.times))
        return price, describe_decisions(compilation)


def _left_out(change: Change) -> str:
    """Say how to have the price of a change that is not compiled anew."""
    how = "that strategy" if change.dimension == "strategy" else "a cluster.json changed so"
    how = "that --size" if change.dimension == "batch" else how
    return f"not compiled anew, since the graph is large; `partc compile` with {how} prices it"


def describe_decisions(compilation: Compilation) -> str:
    """Return what a compilation decided, in a few words: a mesh, or how many parameters go which way."""
    strategy = compilation.strategy
    if strategy.has_meshes:
        return describe_grid(strategy, compilation.lowered.meshes, " x ")
    methods = Counter(choice.method for choice in strategy.parameters.values())
    return ", ".join(f"{count} {NAMES[method]}" for method, count in methods.items())
