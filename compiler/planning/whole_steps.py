"""Price strategies by their whole steps, laid out, lowered and scheduled as `compile` does it."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from partc.compiler.compilation import Compilation
from partc.compiler.options import Options
from partc.compiler.pipeline import DECIDE, LOWERING, run
from partc.compiler.planning.build_plan import build_plan
from partc.compiler.settle_options import settle_options
from partc.cost.cluster.cluster import Cluster
from partc.cost.named_strategy import LAYERWISE, ONE_WEIRD_TRICK
from partc.cost.simulation.memory import check_memory
from partc.cost.simulation.timeline import Measured, simulate
from partc.cost.strategy import Strategy
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
    slowest_s: float = 0.0  # that pricing took
    replicas: int | None = None  # that a batch per replica allows: those of data parallelism
    first: Compilation = field(init=False)

    def __call__(self, name: str, strategy: str | Strategy) -> Priced | None:
        """Return the price of a strategy, None where it cannot be or does not fit."""
        begun_s = time.monotonic()
        try:
            with silent_log():
                return self._price(name, strategy)
        except (InputError, NoPlacement) as error:
            self.refused += 1
            self.failure = self.failure or error
            return None
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)

    def _price(self, name: str, strategy: str | Strategy) -> Priced | None:
        training = self.read()
        options = settle_options(replace(self.options, strategy=strategy), training)
        compilation = Compilation(training, self.cluster, options)
        if self.replicas is not None and compilation.replicas != self.replicas:
            return None  # it would train on another total batch
        run((*DECIDE, LOWERING), compilation)
        if self.priced == 0:
            self.first = compilation
            self.options = replace(self.options, batch=compilation.options.batch)
            self.replicas = compilation.replicas if compilation.analysis.per_replica else None
        measured = Measured(kernels=compilation.options.times)
        chosen, sizes = compilation.strategy, compilation.options.sizes
        plan = build_plan(compilation.analysis, compilation.lowered, chosen, self.cluster, sizes, None)
        check_memory(plan, self.cluster)
        self.priced += 1
        return Priced(name, chosen, simulate(plan, self.cluster, measured).step_s)


def names_for(workers: int) -> Iterator[str]:
    """Yield names of strategies for so many workers, and products of them, the simplest first."""
    parts = [n for n in range(2, workers + 1) if workers % n == 0]
    yield from (f"tensor={n}" for n in parts)
    yield "fsdp"
    yield from (LAYERWISE, ONE_WEIRD_TRICK)
    yield from (f"pipeline={n}" for n in parts)
    yield from (f"spatial={n}" for n in parts)
    for n in parts:
        yield from (f"{words},tensor={n}" for words in ("fsdp", *(f"pipeline={k}" for k in parts)))
