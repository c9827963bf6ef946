"""What else each operator group could be: which steps are small enough to price that, and the answer."""

from dataclasses import dataclass

from partc.compiler.compilation import Compilation
from partc.compiler.report.units import count
from partc.passes.search.operators.operator_space import SplitDegrees

MOST_NODES = 4000  # of larger steps, and on more workers, pricing takes longer than a reader waits for
MOST_WORKERS = 64

NOT_PER_REPLICA = (
    "With a batch per replica every worker runs the whole step on its own samples, so that nothing else was "
    "to choose; --batch global lets operators be split."
)
TOO_LARGE = (
    "What else an operator could be is not priced in this report: {}, and pricing more than {} would keep "
    "you waiting. partc search prices it."
)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A configuration of a group: what it divides, on how many workers, and its price alone."""

    split: SplitDegrees
    workers: int
    computing_s: float
    updating_s: float
    memory_bytes: float
    taken: bool


@dataclass(frozen=True)
class Alternatives:
    """By group as find_groups has them: configurations, the quickest first, or why there are none."""

    of_groups: tuple[tuple[Alternative, ...], ...]
    why_none: str


def find_alternatives(compilation: Compilation) -> Alternatives:
    """Return what else every operator group could be."""
    if compilation.analysis.per_replica:
        return Alternatives((), NOT_PER_REPLICA)
    nodes, workers = len(compilation.training.graph.nodes), compilation.workers
    if nodes > MOST_NODES:
        return too_large(f"the step has {count(nodes)} nodes", f"{count(MOST_NODES)} nodes")
    if workers > MOST_WORKERS:
        return too_large(f"it is for {count(workers)} workers", f"{MOST_WORKERS} workers")
    from partc.compiler.report.operators.price_alternatives import price_alternatives  # which needs numba

    return price_alternatives(compilation)


def too_large(what: str, most: str) -> Alternatives:
    """Return that nothing is priced, and why."""
    return Alternatives((), TOO_LARGE.format(what, most))
