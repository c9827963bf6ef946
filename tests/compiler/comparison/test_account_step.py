"""A predicted step's account: its terms add up to the step, whatever the strategy."""

from pathlib import Path

import pytest

from partc.compiler import api
from partc.compiler.comparison.account_step import account_of
from partc.cost.cluster.cluster import read_cluster
from partc.cost.simulation.instruction_times import time_instructions
from partc.cost.simulation.timeline import simulate
from partc.runtime.plan.program import Run, instructions_of
from tests.builders.plans.wide_mlp import wide_mlp
from tests.checks.command_line import CLUSTER


@pytest.mark.parametrize("strategy", ["allreduce", "ps", "fsdp", "pipeline=2,microbatches=2"])
def test_terms_add_up_to_the_predicted_step(strategy: str, tmp_path: Path) -> None:
    plan = api.compile(wide_mlp(), CLUSTER, tmp_path / "out", strategy=strategy).plan
    cluster = read_cluster(Path(CLUSTER))

    timeline, times = time_instructions(plan, cluster)
    account = account_of(plan, cluster, {rank: (step,) for rank, step in times.items()}, timeline.step_s)

    assert timeline.step_s == simulate(plan, cluster).step_s == plan.predicted_step_s
    assert sum(term.seconds for term in account.terms) == pytest.approx(plan.predicted_step_s, rel=1e-9)
    assert all(term.seconds >= 0 for term in account.terms)
    for rank in plan.ranks:
        program = instructions_of(plan, rank)
        runs = [
            (b, e)
            for i, b, e in zip(program, times[rank.rank].begin_s, times[rank.rank].end_s, strict=True)
            if isinstance(i, Run)
        ]
        own = [e for e in timeline.events if (e.rank, e.lane) == (rank.rank, "compute")]
        drawn = [(e.start_s, e.stop_s) for e in own]
        assert runs == drawn
