"""Why a run takes longer than predicted: whatever is wrong with the cluster file is what is named.

What ranks did is played on the machines as they are, each rank on its own clock; the file tells of others.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from partc.compiler import api
from partc.compiler.comparison.explain_run import ExplainedRun, explain_run, steps_in_sequence
from partc.compiler.comparison.name_cause import name_cause
from partc.compiler.output.write_measured import measured_timeline, typical_step
from partc.compiler.report.describe_measured import with_measured
from partc.cost.cluster.cluster import Cluster, encode_cluster, read_cluster
from partc.cost.cluster.vary_cluster import with_link_rates, with_threads
from partc.cost.simulation.instruction_times import time_instructions
from partc.cost.step_account import Difference
from partc.runtime.execution.recorder import RankTimes, StepTimes
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Plan
from tests.builders.plans.wide_mlp import wide_mlp
from tests.checks.command_line import CLUSTER

REAL = read_cluster(Path(CLUSTER))
STEPS = 5


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> PlanFolder:
    folder = tmp_path_factory.mktemp("explained")
    return api.compile(wide_mlp(), CLUSTER, folder / "out", strategy="allreduce", sizes={"batch": 512})


def moved(step: StepTimes, number: int, by_s: float) -> StepTimes:
    begin_s, end_s = (tuple(moment + by_s for moment in of_step) for of_step in (step.begin_s, step.end_s))
    return msgspec.structs.replace(step, step=number, begin_s=begin_s, end_s=end_s)


def played(plan: Plan, cluster: Cluster, cores: int = 4) -> dict[int, RankTimes]:
    """Return what ranks would record: steps after each other, on clocks that differ by 100 s a rank."""
    timeline, times = time_instructions(plan, cluster)
    return {
        rank: RankTimes(
            -100.0 * rank,
            0.0,
            tuple(moved(step, n, 100.0 * rank + n * timeline.step_s) for n in range(1, STEPS + 1)),
            machine_threads=len(times),
            machine_cores=cores,
        )
        for rank, step in times.items()
    }


def explained(plan: PlanFolder, told: Cluster, times: dict[int, RankTimes]) -> ExplainedRun:
    """Explain a run of a plan whose cluster file says `told`."""
    (plan.path / "cluster.json").write_bytes(encode_cluster(told))
    found = explain_run(plan, times)
    assert found is not None
    return found


def check_sums(run: ExplainedRun) -> None:
    record = run.record
    for account in (record.predicted, record.measured):
        assert sum(term.seconds for term in account.terms) == pytest.approx(account.step_s)
    total_s = record.measured.step_s - record.predicted.step_s
    assert sum(difference.seconds for difference in record.differences) == pytest.approx(total_s)


def test_a_run_as_predicted_has_no_reason(plan: PlanFolder) -> None:
    run = explained(plan, REAL, played(plan.plan, REAL))

    check_sums(run)
    assert run.record.reason == ""
    assert run.record.predicted.step_s == pytest.approx(plan.plan.predicted_step_s)
    assert run.record.measured.step_s == pytest.approx(plan.plan.predicted_step_s)
    assert run.record.measured.steps == STEPS - 1
    first, last = run.record.first_step, run.record.last_step
    assert run.line.endswith(f" in steps {first} to {last}, much as predicted")


def test_links_that_are_ten_times_too_quick_in_the_file_are_named(plan: PlanFolder) -> None:
    run = explained(plan, with_link_rates(REAL, 10), played(plan.plan, REAL))

    check_sums(run)
    rate, told = REAL.links[0].bytes_per_s / 1e6, REAL.links[0].bytes_per_s / 1e5
    assert run.record.reason.startswith("AllReduce went at ")
    assert "(host0 -> host1)" in run.record.reason or "(host1 -> host0)" in run.record.reason
    # Two-level sums: within hosts they are no quicker, so that rates are below those of the links.
    worst = run.record.differences[0]
    assert worst.kind == "transfer"
    assert worst.after_bytes_per_s is not None and worst.before_bytes_per_s is not None
    assert 0.3 * rate < worst.after_bytes_per_s / 1e6 <= rate
    assert 0.3 * told < worst.before_bytes_per_s / 1e6 <= told


def test_devices_that_are_five_times_too_quick_in_the_file_are_named(plan: PlanFolder) -> None:
    quick = with_threads(REAL, 5)
    ranks = tuple(msgspec.structs.replace(rank, threads=5) for rank in plan.plan.ranks)
    believed = PlanFolder(msgspec.structs.replace(plan.plan, ranks=ranks), plan.path)

    run = explained(believed, quick, played(plan.plan, REAL, cores=100))

    check_sums(run)
    assert "segment S1 (01-worker-forward-backward) took" in run.record.reason
    assert run.record.differences[0].kind == "compute"


def test_a_single_slow_rank_is_named(plan: PlanFolder) -> None:
    hosts = list(REAL.hosts)
    slow = {host.name: msgspec.structs.replace(host, memory_bytes_per_s=1e9) for host in hosts[1:]}
    real = msgspec.structs.replace(REAL, hosts=tuple(slow.get(host.name, host) for host in hosts))

    run = explained(plan, REAL, played(plan.plan, real))

    check_sums(run)
    assert (
        "on rank 2, which others took" in run.record.reason
        or "on rank 3, which others took" in run.record.reason
    )


def test_ranks_that_share_fewer_cores_than_the_file_says_are_named(plan: PlanFolder) -> None:
    halved = tuple(msgspec.structs.replace(host, cores=1.0) for host in REAL.hosts)
    real = msgspec.structs.replace(REAL, hosts=halved)

    run = explained(plan, REAL, played(plan.plan, real, cores=2))

    check_sums(run)
    assert run.record.reason.startswith("4\u00a0ranks share 2\u00a0cores, and cluster.json says more: ")
    sharing = next(d for d in run.record.differences if d.kind == "sharing")
    # The simulator knows what sharing does: nothing else is left to explain.
    assert sharing.seconds == pytest.approx(
        run.record.measured.step_s - run.record.predicted.step_s, rel=1e-6
    )


def test_the_longest_sequence_of_traced_steps_counts(plan: PlanFolder) -> None:
    times = played(plan.plan, REAL)

    def without(number: int) -> Callable[[RankTimes], RankTimes]:
        return lambda t: msgspec.structs.replace(t, steps=tuple(s for s in t.steps if s.step != number))

    found = steps_in_sequence(plan.plan, {rank: without(2)(t) for rank, t in times.items()})

    assert found.keys() == times.keys()
    assert all([step.step for step in steps] == [3, 4, 5] for steps in found.values())
    assert steps_in_sequence(plan.plan, {}) == {}


def test_a_rate_that_is_no_lower_is_not_told_as_the_reason_of_a_longer_wait(plan: PlanFolder) -> None:
    waits = Difference(
        "transfer",
        "AllReduce: sum the gradient of W over all workers",
        15.3e-3,
        25.5e-3,
        "a -> b",
        0,
        1 << 24,
        120e6,
        127e6,
    )

    assert name_cause(plan.plan, [waits], {}, {}) == (
        "waiting for AllReduce took 25.5\u00a0ms instead of 15.3\u00a0ms, "
        "not for its rate: 127\u00a0MB/s instead of 120\u00a0MB/s"
    )


def test_a_rate_is_told_of_what_has_one_though_another_was_waited_for_longer(plan: PlanFolder) -> None:
    hidden = Difference("transfer", "AllReduce: sum V", 0.0, 40e-3, "a -> b", 0, 1 << 24, None, 12e6)
    slow = Difference("transfer", "AllReduce: sum W", 15e-3, 25e-3, "a -> b", 0, 1 << 24, 120e6, 12e6)

    told = name_cause(plan.plan, [hidden, slow], {}, {})

    assert told.startswith("AllReduce went at 12.0\u00a0MB/s instead of 120\u00a0MB/s (a -> b)")


def test_a_lower_rate_names_the_cores_that_senders_share(plan: PlanFolder) -> None:
    slow = Difference("transfer", "AllReduce: sum W", 15e-3, 25e-3, "a -> b", 0, 1 << 24, 120e6, 70e6)
    sharing = Difference("sharing", "4 ranks share 2 cores", 40e-3, 45e-3)

    told = name_cause(plan.plan, [slow, sharing], {}, {})

    assert told.startswith("AllReduce went at 70.0\u00a0MB/s instead of 120\u00a0MB/s (a -> b)")
    assert told.endswith(", and 4 ranks share 2 cores")


def test_a_page_of_another_version_says_that_it_cannot_draw_the_step(plan: PlanFolder) -> None:
    run = explained(plan, REAL, played(plan.plan, REAL))
    timeline = measured_timeline(plan.plan, typical_step(run.steps))
    now = (plan.path / "report.html").read_text(encoding="utf-8")
    first_script = now.index("<script>", now.index('id="devices"'))
    earlier = now[:first_script] + now[first_script:].replace("zoom", "enlarge")

    drawn, told = (
        with_measured(page, plan.plan, run.record, timeline, run.line).partition('<section id="measured">')[2]
        for page in (now, earlier)
    )
    assert 'id="measured-timeline"' in drawn and "Another version of partc" not in drawn
    assert 'id="measured-timeline"' not in told and "Another version of partc" in told
    assert run.line in told  # what was measured stands there all the same
