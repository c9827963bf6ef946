"""Choose the number of partitions of large variables: by the cost model, or by short runs.

partc compile --search-partitions model       t(P) from the cost model, no trial runs
partc compile --search-partitions measured    each P compiled and run for a few steps
partc compile --search-partitions fitted      some of them, and a curve through these, as Parallax does
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from partc.compiler.options import Partitioner, SearchMode
from partc.cost.assignment.partitions import TIE
from partc.runtime.check_arguments import public
from partc.runtime.jobs.job_folder import held_folder
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.plan_folder import PlanFolder

TRIAL_STEPS = 20
TRIAL_ROUNDS = 3


@public
def get_partitioner(min_partitions: int = 1, search_partitions: bool | SearchMode = True) -> Partitioner:
    """Return a partitioner that starts from the fewest partitions that fit in memory.

    `search_partitions`: whether the best number is looked for, or how; True: by predicted times. Raises
    BadUsage.
    """
    if isinstance(search_partitions, bool):
        search_partitions = "model" if search_partitions else "off"
    return Partitioner(min_partitions, search_partitions)


def measure_partitions(
    candidates: Sequence[int],
    compile_with: Callable[[int, Path], PlanFolder],
    *,
    rounds: int = TRIAL_ROUNDS,
    steps: int = TRIAL_STEPS,
) -> dict[int, float]:
    """Return the median seconds of a step for each number of partitions, on synthetic data.

    Rounds go through all candidates in turn, so that a machine's slow moments hit all alike.
    """
    with held_folder(Path(tempfile.gettempdir()), "partc-partitions-") as folder:
        plans = {count: compile_with(count, folder / f"{count}") for count in candidates}
        took_s: dict[int, list[float]] = {count: [] for count in candidates}
        for _ in range(rounds):
            for count, plan in plans.items():
                took_s[count].append(1 / Runner(plan).train("synthetic", steps, save=False).steps_per_s)
    return {count: median(times_s) for count, times_s in took_s.items()}


def quickest(step_s: dict[int, float]) -> int:
    """Return the number whose step is shortest; ties to the greater."""
    limit_s = min(step_s.values()) * (1 + TIE)
    return max(count for count, time_s in step_s.items() if time_s <= limit_s)
