"""Choose the number of partitions of large variables: by the cost model, or by short runs.

partc compile --search-partitions model       t(P) from the cost model, no trial runs
partc compile --search-partitions measured    each P compiled and run for a few steps
partc compile --search-partitions fitted      some of them, and a curve through these, as Parallax does

The runs' times are fitted as Parallax fits them:

    t(P) = theta0 + theta1 / P + theta2 P

    theta0   what does not depend on P
    theta1   what partitions share: the busiest server's traffic and updates
    theta2   what every partition costs: messages, joining what arrives

Runs begin with as many partitions as there are machines. P is doubled until a step takes longer than before,
then halved from the first P until it does so again: the best P lies between. Three thetas minimise the sum
of squared errors; none is negative, since none of the three costs is.

Source: parallax-manual.txt (a cost model "that predicts iteration time as a function of the number of
partitions"); its form is that of Kim et al., "Parallax: Sparsity-aware Data Parallel Training of Deep Neural
Networks", EuroSys 2019.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np

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


LEAST_GAIN = 0.02  # of a step's time: less is taken for no gain, as runs differ so much by themselves


@dataclass(frozen=True, slots=True)
class PartitionFit:
    """What steps took, and the curve through it. `thetas` in seconds."""

    measured_s: Mapping[int, float]
    thetas: tuple[float, float, float]
    chosen: int

    def step_s(self, partitions: int) -> float:
        """Return what a step with so many partitions takes by the curve."""
        constant, shared, each = self.thetas
        return constant + shared / partitions + each * partitions


def sample_partitions(
    measure_s: Callable[[int], float], machines: int, least: int, most: int
) -> dict[int, float]:
    """Return partitions -> measured seconds of a step: doubled from `machines`, then halved, while it gains.

    `least`, `most`: what may be tried; no P is measured twice.
    """
    first = min(max(machines, least), most)
    seconds = {first: measure_s(first)}
    for larger in (True, False):
        partitions = first
        while True:
            following = min(2 * partitions, most) if larger else max(partitions // 2, least)
            if following in seconds:
                break
            seconds[following] = measure_s(following)
            if seconds[following] > seconds[partitions] * (1 - LEAST_GAIN):
                break
            partitions = following
    return dict(sorted(seconds.items()))


def fit_partitions(measured_s: Mapping[int, float], servers: int = 1) -> PartitionFit:
    """Return the curve through what was measured, and the P with the least t, between those measured.

    More partitions than `servers` are as many on each. Ties to the greater P, which spreads memory. Fewer
    than three measurements leave thetas at 0.
    """
    partitions = np.array(list(measured_s), float)
    times_s = np.array(list(measured_s.values()), float)
    columns = np.stack([np.ones_like(partitions), 1 / partitions, partitions], axis=1)
    thetas = _least_squares(columns, times_s)
    fit = PartitionFit(dict(measured_s), thetas, 0)
    every = range(min(measured_s), max(measured_s) + 1)
    between = [count for count in every if count <= servers or count % servers == 0]
    limit_s = min(map(fit.step_s, between)) * (1 + 1e-9)
    chosen = max(count for count in between if fit.step_s(count) <= limit_s)
    return PartitionFit(fit.measured_s, thetas, chosen)


def _least_squares(columns: np.ndarray, times_s: np.ndarray) -> tuple[float, float, float]:
    """Return the thetas, none negative, of the least squared error: the best over all sets that are not 0."""
    best, least = np.zeros(3), np.inf
    for size in range(1, min(3, len(times_s)) + 1):
        for chosen in combinations(range(3), size):
            solved = np.linalg.lstsq(columns[:, chosen], times_s, rcond=None)[0]
            error = float(np.sum((columns[:, chosen] @ solved - times_s) ** 2))
            if np.all(solved >= 0) and error < least * (1 - 1e-12):
                best, least = np.zeros(3), error
                best[list(chosen)] = solved
    return float(best[0]), float(best[1]), float(best[2])


def describe_fit(fit: PartitionFit, simulated_s: Mapping[int, float]) -> str:
    """Return the curve in words, and beside it what was measured and what the simulator predicts."""
    constant_ms, shared_ms, each_ms = (theta * 1e3 for theta in fit.thetas)
    rows = [
        f"P = {count}: measured {measured_s * 1e3:.2f} ms, by the curve {fit.step_s(count) * 1e3:.2f} ms, "
        f"simulated {simulated_s[count] * 1e3:.2f} ms"
        for count, measured_s in fit.measured_s.items()
    ]
    curve = f"t(P) = {constant_ms:.3g} + {shared_ms:.3g} / P + {each_ms:.3g} P ms"
    return "; ".join([f"{fit.chosen} partitions of large variables: {curve}", *rows])
