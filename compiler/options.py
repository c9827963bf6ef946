"""What a user asks of partc: the one record that command line, Python API and strategy files feed."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Literal, get_args

import msgspec

from partc.cost.named_strategy import NAMES, NamedStrategy, parse_named
from partc.cost.simulation.measured_kernels import NO_TIMES, KernelTimes
from partc.cost.strategy import Batch, Mechanism, Mode, Strategy, read_strategy
from partc.passes.layouts.strategy_meshes import meshes_of
from partc.passes.search.operators.operator_space import Together
from partc.runtime.check_arguments import check_fields, public_record
from partc.runtime.errors import BadUsage, one_of
from partc.runtime.plan.program import Aggregation, Rounding

SAMPLE_STEPS = 8
SEARCH = "search"  # for a strategy, for so many seconds
SEARCH_S = 60.0
SEARCH_SEEDS = 2**31  # CP-SAT takes no others
SEARCH_BUDGET = f"{SEARCH_S:.0f}s"
PLACED = "placed"  # each operator on one device

SearchMethod = Literal["auto", "mcmc", "ilp", "dp", "exhaustive"]
SearchMode = Literal["off", "model", "measured", "fitted"]


def strategy_names() -> tuple[str, ...]:
    """Return the words that ask for a strategy: modes, searches, and what named strategies begin with."""
    return (*get_args(Mode), SEARCH, PLACED, *NAMES)


@public_record
@dataclass(frozen=True)
class GraphOptions:
    """What a training graph's file does not say, or says otherwise.

    state        variable -> the output that holds its next value
    sample_axes  data input -> its sample axis; None: the same for all replicas
    loss         the output that is the loss
    initial      a .npz or .safetensors file of the variables' first values
    """

    state: Mapping[str, str] | None = None
    sample_axes: Mapping[str, int | None] | None = None
    loss: str | None = None
    initial: str | Path | None = None


@public_record
@dataclass(frozen=True, slots=True)
class Sample:
    """Data to measure from, as `--data` takes it, and how many steps of it."""

    data: str
    steps: int = SAMPLE_STEPS


@public_record
@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How a strategy is searched for.

    budget_s   seconds, unless proposals are given
    seed       of what is tried: any whole number
    proposals  how many configurations of operators are tried: the same on every machine; None: seconds count
    together   which operators have one configuration: steps of a recurrence, or repeated layers, too; None:
               each may have its own
    """

    budget_s: float = SEARCH_S
    seed: int = 0
    method: SearchMethod = "auto"
    proposals: int | None = None
    together: Together | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.budget_s < inf:
            raise BadUsage(
                f"a search of {self.budget_s} s", at="SearchOptions.budget_s", fix="give seconds, more than 0"
            )
        if self.proposals is not None and self.proposals < 1:
            raise BadUsage(
                f"{self.proposals} proposals",
                at="SearchOptions.proposals",
                fix="try at least one, or leave it out",
            )

    @property
    def drawn_seed(self) -> int:
        """Return the seed as generators and solvers take it, none of which takes negative or long ones."""
        return self.seed % SEARCH_SEEDS


@public_record
@dataclass(frozen=True, slots=True)
class Partitioner:
    """How large variables are partitioned, as parallax.get_partitioner makes it.

    off: into `min_partitions`; otherwise into the best number from there on: by predicted times (model), by
    those of short runs of every number (measured), or by a curve through some of them (fitted).
    """

    min_partitions: int = 1
    search: SearchMode = "off"

    def __post_init__(self) -> None:
        if not isinstance(self.min_partitions, int) or self.min_partitions < 1:
            raise BadUsage(
                f"{self.min_partitions} partitions", at="min_partitions", fix="ask for at least one"
            )
        if not isinstance(self.search, str) or self.search not in get_args(SearchMode):
            fix = f"choose one of {', '.join(get_args(SearchMode))}"
            raise BadUsage(f"no search {self.search!r}", at="search_partitions", fix=fix)


@public_record
@dataclass(frozen=True, kw_only=True)
class Options:
    """How a training step is compiled.

    strategy     how the step is spread: a mode, a name such as tensor=2, the path of a strategy.json, a
                 strategy, search: what a search finds, or placed: each operator on one device
    search       how a strategy is searched for, where that is asked for
    batch        what the graph's batch is: one replica's, or the whole; None: as choose_reading.py does
    sizes        symbolic size -> value, for pricing and synthetic data
    options      what the training graph's file does not say
    sample       data from which the rows that a step touches are measured; None: assumed
    partitions   of large variables on servers: a number, or how to choose it; None: as balance wants
    without      mechanisms that are switched off, to see what they bring
    asynchronous workers push and pull without waiting for each other (docs/asynchronous.md)
    what_if      whether the step is priced with other machines, strategies and batches, too (docs/what-if.md)
    aggregation  whether gradients are averaged or summed, and which ones are outputs; None: as the
                 strategy says
    replica_outputs  outputs that are means over replicas are told of each replica as well, as NAME.replica
    round_sums   the 16-bit type to which dense gradients are rounded before they are sent: not what one
                 device trains, and chosen by nobody but the user
    recompute_bytes  what a step's values may take at once, others are computed again; None: as the
                 strategy says
    strategy_name  the name that `strategy` had where what it led to has replaced it
    force        trained variables of an earlier plan in the output folder may go
    profile      a profile.json of measured kernels, or what it says of the cluster; None: rooflines alone
    """

    strategy: str | NamedStrategy | Strategy = "auto"
    search: SearchOptions = SearchOptions()
    batch: Batch | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    options: GraphOptions = GraphOptions()
    sample: Sample | None = None
    partitions: Partitioner | int | None = None
    without: Collection[Mechanism] = ()
    asynchronous: bool = False
    what_if: bool = False
    aggregation: Aggregation | None = None
    replica_outputs: bool = False
    recompute_bytes: int | None = None
    round_sums: Rounding = ""
    strategy_name: str = ""
    force: bool = False
    profile: str | Path | KernelTimes | None = None

    def __post_init__(self) -> None:
        if isinstance(self.recompute_bytes, int) and self.recompute_bytes < 1:
            raise BadUsage(
                f"{self.recompute_bytes} bytes are no size",
                at="Options.recompute_bytes",
                fix="give a number of bytes, at least 1, or leave it out",
            )

    @property
    def times(self) -> KernelTimes:
        """Return what is known of measured kernels. Needs: the profile has been read."""
        assert not isinstance(self.profile, str | Path), "the profile is read first"
        return self.profile or NO_TIMES

    @property
    def asked_strategy(self) -> str:
        """Return the name of the strategy that was asked for, nothing where that was a file, or has none."""
        if self.strategy_name:
            return self.strategy_name
        if isinstance(self.strategy, NamedStrategy):
            return self.strategy.text
        return self.strategy if isinstance(self.strategy, str) and not self.strategy.endswith(".json") else ""

    def chosen_strategy(self) -> Mode | NamedStrategy | Strategy:
        """Return the mode, or the strategy, which may lie in a file. Raises BadUsage, BadStrategy."""
        if isinstance(self.strategy, NamedStrategy | Strategy):
            return self.strategy
        modes: dict[str, Mode] = {mode: mode for mode in get_args(Mode)}
        if self.strategy in modes:
            return modes[self.strategy]
        if (named := parse_named(self.strategy)) is not None:
            return named
        if not self.strategy.endswith(".json"):
            fix = f"{one_of(strategy_names(), self.strategy)}, or the path of a strategy.json"
            raise BadUsage(f"no strategy {self.strategy!r}", at="--strategy", fix=fix)
        return read_strategy(Path(self.strategy))

    @property
    def divides_more(self) -> bool:
        """Tell whether a strategy is asked for that divides more than samples and variables."""
        strategy = self.chosen_strategy()
        return isinstance(strategy, NamedStrategy | Strategy) and strategy.divides_more

    def chosen_replicas(self, workers: Sequence[str], hosts: Sequence[str]) -> int:
        """Return how many replicas the workers make: as many as they are, without meshes.

        `workers`: their names; `hosts`: of each. Raises BadUsage, BadStrategy where they do not make the
        meshes that were asked for.
        """
        strategy = self.chosen_strategy()
        if isinstance(strategy, NamedStrategy):
            return strategy.replicas(hosts)
        if not isinstance(strategy, Strategy) or not strategy.has_meshes:
            return len(workers)
        return meshes_of(strategy, workers).replicas

    def chosen_batch(self) -> Batch:
        """Return what the graph's batch is. Needs: it is chosen."""
        assert self.batch is not None, "the batch is chosen first"
        return self.batch

    def chosen_aggregation(self) -> Aggregation:
        """Return how gradients become one, of which a user's own strategy may tell. None is fetched twice."""
        default = self.strategy.aggregation if isinstance(self.strategy, Strategy) else Aggregation()
        chosen = default if self.aggregation is None else self.aggregation
        return msgspec.structs.replace(
            chosen,
            fetched=tuple(dict.fromkeys(chosen.fetched)),
            replica_outputs=chosen.replica_outputs or self.replica_outputs,
        )

    def chosen_recompute_bytes(self) -> int | None:
        """Return the most bytes of values at once, of which a user's own strategy may tell."""
        if self.recompute_bytes is not None:
            return self.recompute_bytes
        return self.strategy.recompute_bytes if isinstance(self.strategy, Strategy) else None

    def chosen_rounding(self) -> Rounding:
        """Return to what gradients are rounded, of which a user's own strategy may tell."""
        if self.round_sums:
            return self.round_sums
        return self.strategy.round_sums if isinstance(self.strategy, Strategy) else ""

    def complete(self, strategy: Strategy) -> Strategy:
        """Return a strategy with the decisions that are the user's alone."""
        requested = self.strategy if isinstance(self.strategy, Strategy) else strategy
        return msgspec.structs.replace(
            strategy,
            format=requested.format,
            mesh=requested.mesh,
            devices=requested.devices,
            variables=requested.variables,
            ops=requested.ops,
            stages=requested.stages,
            microbatches=requested.microbatches,
            aggregation=self.chosen_aggregation(),
            recompute_bytes=self.chosen_recompute_bytes(),
            round_sums=self.chosen_rounding(),
        )
