"""Price strategies by their whole steps, laid out, lowered and scheduled as `compile` does it.

The step is read and analysed once: strategies share that; those that write nodes of the graph anew copy it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from statistics import median

from partc.compiler.compilation import Compilation
from partc.compiler.options import Options
from partc.compiler.pipeline import ANALYSE, CHOICE, LOWERING, OUTLINE, run
from partc.compiler.planning.stopwatch import paused_collection
from partc.compiler.settle_options import begin_compilation
from partc.cost.cluster.cluster import Cluster
from partc.cost.named_strategy import LAYERWISE, ONE_WEIRD_TRICK, WORKERS, parse_named
from partc.cost.simulation.timeline import Measured, simulate
from partc.cost.strategy import Strategy
from partc.passes.graph.fix_sizes import fix_sizes, open_sizes
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.errors import InputError, NoPlacement
from partc.runtime.log import silent_log


@dataclass(frozen=True, slots=True)
class Priced:
    """A strategy and the simulated seconds of its step. `name`: what it is, in a word."""

    name: str
    strategy: Strategy
    step_s: float


@dataclass
class WholeSteps:
    """Prices strategies by their whole steps. `read`: returns the graph anew, since compiling changes it."""

    read: Callable[[], TrainingGraph]
    cluster: Cluster
    options: Options
    priced: int = 0
    refused: int = 0
    failure: Exception | None = None
    taken_s: list[float] = field(default_factory=list)  # that pricing took, of each
    replicas: int | None = None  # that a batch per replica allows: those of data parallelism
    first: Compilation | None = None  # data parallelism's, analysed
    _fixed: Compilation | None = None  # so too, with numbers for what the first leaves open
    _quickest: tuple[Priced, Compilation] | None = field(default=None, repr=False)

    def __call__(self, name: str, strategy: str | Strategy) -> Priced | None:
        """Return the price of a strategy, None where it cannot be or does not fit."""
        begun_s = time.monotonic()
        try:
            with silent_log():
                priced = self._price(name, strategy)
        except (InputError, NoPlacement) as error:
            self.refused += 1
            self.failure = self.failure or error
            return None
        self.taken_s.append(time.monotonic() - begun_s)
        return priced

    @property
    def usual_s(self) -> float:
        """Return what pricing takes: the median, for a pipeline of many stages takes twenty times that."""
        return median(self.taken_s) if self.taken_s else 0.0

    def first_of(self, names: Iterable[str]) -> Priced | None:
        """Return the price of the first name that can be and fits, None where there is none."""
        return next((priced for name in names if (priced := self(name, name)) is not None), None)

    def compilation_of(self, priced: Priced) -> Compilation:
        """Return the compilation of a name that was priced, decided and lowered as `compile` does it."""
        if self._quickest is None or self._quickest[0].name != priced.name:  # another process priced it
            compilation = self._begin(replace(self.options, strategy=priced.name))
            self._analyse(compilation)
            run((CHOICE, LOWERING), compilation)
            self._quickest = priced, compilation
            return compilation
        return self._quickest[1]

    @paused_collection()
    def _price(self, name: str, strategy: str | Strategy) -> Priced | None:
        compilation = self._begin(replace(self.options, strategy=strategy))
        if self.replicas is not None and compilation.replicas != self.replicas:
            return None  # it would train on another total batch
        self._analyse(compilation)
        self._note_first(compilation)
        run((CHOICE, LOWERING, OUTLINE), compilation)
        plan, measured = compilation.plan, Measured(kernels=compilation.options.times)
        self.priced += 1
        priced = Priced(name, compilation.strategy, simulate(plan, self.cluster, measured).step_s)
        if self._quickest is None or priced.step_s < self._quickest[0].step_s:
            self._quickest = priced, compilation
        return priced

    @property
    def first_of_fixed_sizes(self) -> Compilation:
        """Return the step as what divides more than samples has it: analysed, every size a number."""
        assert self.first is not None, "data parallelism was priced"
        if not open_sizes(self.first.training):
            return self.first
        if self._fixed is None:
            training = self.read()
            fix_sizes(training, self.first.options.sizes)
            self._fixed = begin_compilation(training, self.cluster, self.options)
            run(ANALYSE, self._fixed)
        return self._fixed

    def _begin(self, options: Options) -> Compilation:
        shared = self._shared_by(options)
        return begin_compilation(self.read() if shared is None else shared.training, self.cluster, options)

    def _shared_by(self, options: Options) -> Compilation | None:
        """Return the first step of its kind, unless its graph was written anew."""
        if self.first is None:
            return None
        first = self.first_of_fixed_sizes if options.divides_more else self.first
        return None if first.is_expanded else first

    def _analyse(self, compilation: Compilation) -> None:
        """Analyse the step, or take over what is known of it: the same for any number of replicas.

        Only a batch per replica is analysed for a number of them, and all its strategies have the first's.
        """
        first = self._shared_by(compilation.options)
        if first is None:
            run(ANALYSE, compilation)
            return
        compilation.roles, compilation.main, compilation.tensors = first.roles, first.main, first.tensors
        compilation.sparsity = first.sparsity
        compilation.departures = first.departures if first.analysis.per_replica else ()
        compilation.analysis = replace(first.analysis, replicas=compilation.replicas)
        compilation.shares_graph = True

    def _note_first(self, compilation: Compilation) -> None:
        """Keep the first step that was analysed, whose batch and total batch the others have."""
        if self.first is None:
            self.first = compilation
            self.options = replace(self.options, batch=compilation.options.batch)
            self.replicas = compilation.replicas if compilation.analysis.per_replica else None


def names_for(hosts: Sequence[str]) -> Iterator[str]:
    """Yield names of strategies, of each kind one by turns, products, and fewer workers. `hosts`: of each.

    Of degrees, a host's devices come first, then all workers, then the others; of stages, the fewest.
    """
    workers, on_host = len(hosts), hosts.count(hosts[0])
    stages = [n for n in range(2, workers + 1) if workers % n == 0]
    parts = sorted(stages, key=lambda n: (n != on_host, n != workers, n))
    kinds = (
        [f"tensor={n}" for n in parts],
        [ONE_WEIRD_TRICK],
        [LAYERWISE],
        [f"pipeline={n}" for n in stages],
        [f"spatial={n}" for n in parts],
        ["fsdp"],
    )
    yield from (name for turn in zip_longest(*kinds) for name in turn if name is not None)
    for n in parts:
        others = [k for k in stages if workers % (k * n) == 0]
        yield from (
            f"{words},tensor={n}" for words in (*["fsdp"] * (n < workers), *(f"pipeline={k}" for k in others))
        )
    yield from names_of_fewer(hosts)


def names_of_fewer(hosts: Sequence[str]) -> list[str]:
    """Return names for some workers alone: one, a host's, whole hosts, and parts of one.

    They are replicas, or share weights: all of them, or those of a host.
    """
    workers, on_host = len(hosts), hosts.count(hosts[0])
    counts = [n for n in range(1, workers) if on_host % n == 0 or (n % on_host == 0 and workers % n == 0)]
    shared = [
        f"tensor={k},{WORKERS}={n}" for n in counts if n > 1 for k in dict.fromkeys((min(n, on_host), n))
    ]
    return [*(f"{WORKERS}={n}" for n in counts), *shared]


def names_beside(name: str, hosts: Sequence[str]) -> list[str]:
    """Return what else to price where a name is the quickest: few replicas may share their variables."""
    named = parse_named(name)
    if named is None or named.workers is None or named.shards_variables:
        return []
    return [f"fsdp,{name}"] if named.mesh(len(hosts))["data"] > 1 else []
