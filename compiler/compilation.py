"""What is known of a compilation so far: every stage reads from it, and adds what it finds."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from partc.compiler.options import Options
from partc.compiler.output.plan_files import PlanFiles
from partc.compiler.planning.ahead import Ahead
from partc.compiler.planning.check_estimate import EstimateSensitivity
from partc.compiler.planning.order_step import OrderedStep
from partc.compiler.planning.price_step import StepPricer
from partc.compiler.planning.stopwatch import Stopwatch
from partc.cost.assignment.partitions import PartitionSearch
from partc.cost.assignment.search_strategy import Tried
from partc.cost.assignment.synchronisation import StrategyCosts, SyncChoice
from partc.cost.cluster.cluster import Cluster, ranks_of, view_of_session
from partc.cost.simulation.memory import DeviceMemory
from partc.cost.simulation.timeline import Timeline
from partc.cost.sparsity import Sparsity
from partc.cost.strategy import Strategy, SyncFacts
from partc.cost.what_if import WhatIf
from partc.passes.analysis import Analysis
from partc.passes.graph.facts import Facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.indexed_rows.expected_rows import ExpectedRows
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.roles.find_roles import Roles
from partc.runtime.plan.program import Plan

SyncSearch = Callable[[Callable[[], SyncChoice]], SyncChoice]


def _search_here(choose: Callable[[], SyncChoice]) -> SyncChoice:
    return choose()


@dataclass
class Compilation:
    """A plan and what leads to it. What has no value yet is not there: stages run in their order."""

    training: TrainingGraph
    cluster: Cluster
    options: Options
    watch: Stopwatch = field(default_factory=Stopwatch)

    # the step
    departures: tuple[str, ...] = ()  # of a batch per replica from one device
    sparsity: Sparsity | None = None  # as measured
    roles: Roles = field(init=False)
    main: set[str] = field(init=False)  # names of the nodes of the main computation
    tensors: Facts = field(init=False)
    analysis: Analysis = field(init=False)
    is_expanded: bool = False  # nodes of its graph were said in primitives, for its strategy
    shares_graph: bool = False  # its graph is another's as well: it is copied before it is written anew

    # the decisions
    search: SyncSearch = _search_here  # who searches how parameters are synchronised
    facts: tuple[SyncFacts, ...] = field(init=False)
    partitions: PartitionSearch | None = None  # if it was asked for
    price: StepPricer = field(init=False)
    strategy: Strategy = field(init=False)
    costs: StrategyCosts = field(init=False)
    compared: tuple[Tried, ...] = ()  # whole steps that `auto` compared, the one taken first
    sensitivity: EstimateSensitivity | None = None  # where an estimate of rows touched decided
    expected: Mapping[str, ExpectedRows] = field(default_factory=dict)

    price_changes: "Callable[[Compilation], WhatIf] | None" = None  # if it is asked what if
    what_if: WhatIf | None = None

    # the plan
    lowered: LoweredGraph = field(init=False)
    ordered: OrderedStep | None = None  # of the lowered graph
    files: PlanFiles = field(init=False)
    processes: ExitStack = field(init=False)  # which end when the plan is written
    opening: Ahead[None] | None = None  # segments, on another core
    plan: Plan = field(init=False)
    timeline: Timeline = field(init=False)
    memory: tuple[DeviceMemory, ...] = field(init=False)
    uneven_stages: str = ""  # why a pipeline's stages have unequal work, if they have

    @property
    def machines(self) -> Cluster:
        """Return what the plan's ranks run on: the cluster, or one session's view of it."""
        return view_of_session(self.cluster) if self.options.asynchronous else self.cluster

    @property
    def workers(self) -> int:
        """Return the replicas of all ranks together, whether they wait for each other or not."""
        return len(self.worker_names)

    @property
    def worker_names(self) -> tuple[str, ...]:
        """Return the names of the devices that work on replicas, in their order."""
        return tuple(rank.device for rank in ranks_of(self.cluster) if rank.replica is not None)

    @property
    def worker_hosts(self) -> tuple[str, ...]:
        """Return the host of every such device."""
        return tuple(rank.host for rank in ranks_of(self.cluster) if rank.replica is not None)

    @property
    def replicas(self) -> int:
        """Return how many replicas there are: of one worker each, if the strategy has no mesh of them."""
        return self.options.chosen_replicas(self.worker_names, self.worker_hosts)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the original graph's tensors, under the assumed sizes."""
        return self.analysis.facts.shapes
