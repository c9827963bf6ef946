"""What a run's step took beside its prediction, and why: measured.json, and one line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from partc.compiler.comparison.account_step import account_of
from partc.compiler.comparison.name_cause import name_cause
from partc.compiler.kernel_times.read_times import times_of_plan
from partc.compiler.report.units import count, plural, seconds
from partc.cost.cluster.cluster import Cluster, read_cluster
from partc.cost.cluster.machines import Host
from partc.cost.simulation.instruction_times import time_instructions
from partc.cost.simulation.timeline import Measured
from partc.cost.step_account import RUN_FORMAT, Difference, MeasuredRun, StepAccount, differences_of
from partc.runtime.execution.recorder import RankTimes, StepTimes
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Plan

CLUSTER = "cluster.json"
AS_PREDICTED = 0.05  # a difference that needs no reason
FEWER_CORES = 0.95

Steps = Mapping[int, tuple[StepTimes, ...]]


@dataclass(frozen=True, slots=True)
class ExplainedRun:
    """A run's record, and the steps that it is of: on the first rank's clock, by rank."""

    record: MeasuredRun
    steps: Steps

    @property
    def line(self) -> str:
        """Return the record in one line, with the steps that it is of: others may have taken longer."""
        record, first, last = self.record, count(self.record.first_step), count(self.record.last_step)
        where = f"in step {first}" if first == last else f"in steps {first} to {last}"
        predicted_s, measured_s = record.predicted.step_s, record.measured.step_s
        times = f"predicted {seconds(predicted_s)}, measured {seconds(measured_s)} {where}"
        return f"{times}, because {record.reason}" if record.reason else f"{times}, much as predicted"


def explain_run(folder: PlanFolder, times: Mapping[int, RankTimes]) -> ExplainedRun | None:
    """Return what a run's traced steps took, and why; None without such steps, or a cluster.json."""
    plan, file = folder.plan, folder.path / CLUSTER
    steps = steps_in_sequence(plan, times)
    if not file.exists() or not steps:
        return None
    cluster = read_cluster(file)
    measured = Measured(kernels=times_of_plan(folder.path, cluster))
    return ExplainedRun(_record(plan, cluster, times, steps, measured), steps)


def _record(
    plan: Plan, cluster: Cluster, times: Mapping[int, RankTimes], steps: Steps, measured: Measured
) -> MeasuredRun:
    there = with_cores_of_run(plan, cluster, times)
    before, at = _predict(plan, cluster, measured)
    expected, at = (before, at) if there is cluster else _predict(plan, there, measured)
    after = account_of(plan, there, steps)
    differences = differences_of(expected, after, lambda term: term.name or term.group)
    if there is not cluster:
        sharing = Difference("sharing", sharing_of(plan, times), before.step_s, expected.step_s)
        differences = tuple(sorted((sharing, *differences), key=lambda d: -abs(d.seconds)))
    differs = abs(after.step_s - before.step_s) > AS_PREDICTED * before.step_s
    first, *_, last = (*steps[0], *steps[0])
    return MeasuredRun(
        RUN_FORMAT,
        plan.sha256,
        first.step,
        last.step,
        before,
        after,
        differences,
        name_cause(plan, differences, at, steps) if differs else "",
    )


def _predict(plan: Plan, cluster: Cluster, measured: Measured) -> tuple[StepAccount, dict[int, StepTimes]]:
    """Return a predicted step's account, and when every rank executes what."""
    timeline, times = time_instructions(plan, cluster, measured)
    account = account_of(plan, cluster, {rank: (step,) for rank, step in times.items()}, timeline.step_s)
    return account, times


def with_cores_of_run(plan: Plan, cluster: Cluster, times: Mapping[int, RankTimes]) -> Cluster:
    """Return the cluster with the cores that ranks had where they are fewer than it says, else itself."""
    hosts: list[Host] = []
    for host in cluster.hosts:
        ranks = [rank for rank in plan.ranks if rank.host == host.name and rank.kind == "cpu"]
        threads = sum(rank.threads for rank in ranks)
        cores = min(
            (_share(times[rank.rank], threads) for rank in ranks if times[rank.rank].machine_cores),
            default=float("inf"),
        )
        declared_cores = threads if host.cores is None else host.cores
        hosts.append(
            msgspec.structs.replace(host, cores=cores) if cores < FEWER_CORES * declared_cores else host
        )
    if all(new is old for new, old in zip(hosts, cluster.hosts, strict=True)):
        return cluster
    return msgspec.structs.replace(cluster, hosts=tuple(hosts))


def _share(of_rank: RankTimes, threads: int) -> float:
    """Return the cores that so many threads have of a rank's machine, if all of its ranks are at work."""
    return of_rank.machine_cores * threads / max(of_rank.machine_threads, threads)


def sharing_of(plan: Plan, times: Mapping[int, RankTimes]) -> str:
    """Return who shares how many cores on the fullest machine: 4 ranks share 2 cores."""
    fullest = max(times.values(), key=lambda t: t.machine_threads / max(1, t.machine_cores))
    who = "rank" if all(rank.threads == 1 for rank in plan.ranks) else "thread"
    return f"{plural(fullest.machine_threads, who)} share {plural(fullest.machine_cores, 'core')}"


def steps_in_sequence(plan: Plan, times: Mapping[int, RankTimes]) -> Steps:
    """Return the longest sequence of traced steps that every rank has, on the first rank's clock."""
    if any(rank.rank not in times for rank in plan.ranks):
        return {}
    traced = [{step.step for step in times[rank.rank].steps} for rank in plan.ranks]
    chosen = _longest_sequence(sorted(set.intersection(*traced)))
    steps = {
        rank.rank: tuple(
            _shifted(step, times[rank.rank].offset_s)
            for step in times[rank.rank].steps
            if step.step in chosen
        )
        for rank in plan.ranks
    }
    return steps if any(step.begin_s for of_rank in steps.values() for step in of_rank) else {}


def _longest_sequence(numbers: Sequence[int]) -> frozenset[int]:
    sequences: list[list[int]] = []
    for number in numbers:
        if sequences and number == sequences[-1][-1] + 1:
            sequences[-1].append(number)
        else:
            sequences.append([number])
    longest: list[int] = max(sequences, key=len) if sequences else []
    return frozenset(longest)


def _shifted(step: StepTimes, offset_s: float) -> StepTimes:
    begin_s, end_s = (
        tuple(moment + offset_s for moment in moments) for moments in (step.begin_s, step.end_s)
    )
    return msgspec.structs.replace(step, begin_s=begin_s, end_s=end_s)
