"""Find what else operator groups could be, of steps that are small enough to price that."""

from partc.compiler.compilation import Compilation
from partc.compiler.report.operators.alternatives import Alternatives, too_large
from partc.compiler.report.units import count

MOST_NODES = 4000  # of larger steps, and on more workers, pricing takes longer than a reader waits for
MOST_WORKERS = 64

NOT_PER_REPLICA = (
    "With a batch per replica every worker runs the whole step on its own samples, so that nothing else was "
    "to choose; --batch global lets operators be split."
)


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
