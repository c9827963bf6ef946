"""Name the largest cause of a run's step being longer or shorter than predicted, with its number.

    cores       segments waited for a core          "4 ranks share 2 cores"
    computing   segments took longer with one       "S1 took 14.2 ms instead of 5.10 ms on rank 2"
    transfers   a kind of communication              "AllReduce at 2.10 GB/s instead of 7.90 GB/s", and which
                                                     cores ranks share, who send with these
    the rest    beginning communications, copies, between steps

Causes are sums of differences, so together they are the difference of the steps; the largest of its sign
is named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from statistics import fmean, median

from partc.compiler.report.describe_program import segment_names
from partc.compiler.report.units import seconds, size
from partc.cost.step_account import RATED_BYTES, Difference
from partc.runtime.execution.recorder import StepTimes
from partc.runtime.plan.program import Plan, Rank, Run, instructions_of

UNLIKE_OTHERS = 1.3  # a rank that takes so many times as long for the same is told apart
Steps = Mapping[int, Sequence[StepTimes]]


@dataclass(frozen=True, slots=True)
class _Cause:
    seconds: float
    words: str


def name_cause(
    plan: Plan,
    differences: Sequence[Difference],
    predicted: Mapping[int, StepTimes],
    measured: Steps,
) -> str:
    """Return the largest cause in words. `measured`: the steps that the differences are of."""
    total_s = sum(difference.seconds for difference in differences)
    sign = 1 if total_s > 0 else -1
    causes = [
        *_of_cores(differences),
        *_of_computing(plan, differences, predicted, measured),
        *_of_transfers(differences, sign),
        *_of_the_rest(differences),
    ]
    return max(causes, key=lambda cause: sign * cause.seconds).words


def _of_cores(differences: Sequence[Difference]) -> list[_Cause]:
    """Return what waiting for a core adds: that there are fewer than the cluster file says, and the rest."""
    waits = [difference for difference in differences if difference.kind == "core"]
    before_s, after_s = (sum(d.before_s for d in waits), sum(d.after_s for d in waits))
    sharing = next((difference for difference in differences if difference.kind == "sharing"), None)
    if sharing is None:
        waited = f"ranks waited {seconds(after_s)} for a core instead of {seconds(before_s)}"
        return [_Cause(after_s - before_s, f"{waited}: other threads or processes held them up")]
    words = f"{sharing.what}, and cluster.json says more: {seconds(sharing.after_s)} are predicted with these"
    more_s = after_s - before_s
    if more_s > sharing.seconds / 2:
        words += f"; they waited {seconds(more_s)} longer for a core than that"
    return [_Cause(sharing.seconds + max(0.0, more_s), words)]


def _of_computing(
    plan: Plan, differences: Sequence[Difference], predicted: Mapping[int, StepTimes], measured: Steps
) -> list[_Cause]:
    """Return what all segments took longer for, named by the one that adds most."""
    computing = [difference for difference in differences if difference.kind == "compute"]
    if not computing:
        return []
    total_s = sum(difference.seconds for difference in computing)
    worst = max(computing, key=lambda d: d.seconds if total_s > 0 else -d.seconds)
    runs = _run_seconds(plan, predicted, measured, worst.what.partition(" ")[0])
    rank = worst.rank if worst.rank in runs else max(runs, key=lambda r: runs[r][1], default=worst.rank)
    before_s, after_s = runs.get(rank, (worst.before_s, worst.after_s))
    words = f"segment {worst.what} took {seconds(after_s)} instead of {seconds(before_s)} on rank {rank}"
    others = [after for other, (_, after) in runs.items() if other != rank]
    if others and after_s > UNLIKE_OTHERS * median(others):
        words += f", which others took {seconds(median(others))} for"
    if len(computing) > 1 and abs(total_s) > 1.5 * abs(worst.seconds):
        sums = (sum(d.after_s for d in computing), sum(d.before_s for d in computing))
        words = f"computing took {seconds(sums[0])} instead of {seconds(sums[1])}: most of it {words}"
    return [_Cause(total_s, words)]


def _run_seconds(
    plan: Plan, predicted: Mapping[int, StepTimes], measured: Steps, name: str
) -> dict[int, tuple[float, float]]:
    """Return what a step's runs of a segment take with a core: rank -> (predicted, measured)."""
    names = segment_names(plan)
    seconds: dict[int, tuple[float, float]] = {}
    for rank in plan.ranks:
        at = [
            number
            for number, i in enumerate(instructions_of(plan, rank))
            if isinstance(i, Run) and names[PurePosixPath(i.segment).stem] == name
        ]
        if at:
            after_s = fmean(_computing_s(step, at, rank) for step in measured[rank.rank])
            seconds[rank.rank] = _computing_s(predicted[rank.rank], at, rank), after_s
    return seconds


def _computing_s(step: StepTimes, at: Sequence[int], rank: Rank) -> float:
    has_cpu = bool(step.cpu_s) and rank.kind == "cpu"
    return sum(
        min(step.cpu_s[i], step.end_s[i] - step.begin_s[i]) if has_cpu else step.end_s[i] - step.begin_s[i]
        for i in at
    )


def _of_transfers(differences: Sequence[Difference], sign: int) -> list[_Cause]:
    """Return a cause for each kind of communication, by the link that it occupies longest."""
    kinds: dict[str, list[Difference]] = {}
    for difference in differences:
        if difference.kind == "transfer":
            kinds.setdefault(difference.what.partition(":")[0], []).append(difference)
    sharing = next((f", and {d.what}" for d in differences if d.kind == "sharing"), "")
    causes = [_of_kind(kind, same, sign) for kind, same in kinds.items()]
    return [replace(c, words=c.words + sharing) if c.seconds > 0 else c for c in causes]


def _of_kind(kind: str, same: Sequence[Difference], sign: int) -> _Cause:
    rated = [d for d in same if d.before_bytes_per_s is not None and d.after_bytes_per_s is not None]
    worst = max(rated or same, key=lambda difference: sign * difference.seconds)
    before_s, after_s = sum(d.before_s for d in same), sum(d.after_s for d in same)
    took = f"took {seconds(after_s)} instead of {seconds(before_s)}"
    before, after = worst.before_bytes_per_s, worst.after_bytes_per_s
    if before is None or after is None or sum(d.bytes for d in same) < RATED_BYTES:
        return _Cause(after_s - before_s, f"waiting for {kind} {took}")
    if sign * (after - before) >= 0:  # its bytes do not explain it
        rates = f"{size(after)}/s instead of {size(before)}/s"
        return _Cause(after_s - before_s, f"waiting for {kind} {took}, not for its rate: {rates}")
    link = f" ({worst.link})" if worst.link else ""
    rates = f"{kind} went at {size(after)}/s instead of {size(before)}/s{link}"
    return _Cause(after_s - before_s, f"{rates}: waiting for it {took}")


def _of_the_rest(differences: Sequence[Difference]) -> list[_Cause]:
    return [
        _Cause(d.seconds, f"{d.what} took {seconds(d.after_s)} instead of {seconds(d.before_s)}")
        for d in differences
        if d.kind in ("start", "store", "data", "between")
    ]
