"""Write the predicted timeline of a plan, and that of a run, with the prediction beside it."""

from collections.abc import Mapping
from pathlib import Path

from partc.compiler.traces.measured import measured_bars, measured_process
from partc.compiler.traces.predicted import predicted_bars, predicted_process
from partc.compiler.traces.trace_events import write_trace
from partc.cost.cluster import read_cluster
from partc.cost.timeline import Timeline, simulate
from partc.runtime.plan_folder import PlanFolder
from partc.runtime.program import Plan
from partc.runtime.recorder import RankTimes

HOW_TO_OPEN = "Open a trace at https://ui.perfetto.dev (Open trace file), or in Chrome at chrome://tracing."


def write_predicted_trace(path: Path, plan: Plan, timeline: Timeline) -> None:
    """Write one step as the simulator sees it."""
    write_trace(path, predicted_bars(plan, timeline), [predicted_process(rank) for rank in plan.ranks])


def write_run_trace(path: Path, folder: PlanFolder, times: Mapping[int, RankTimes]) -> None:
    """Write the recorded steps, and beside the first of them the prediction, rank by rank.

    A plan without its cluster.json has no prediction.
    """
    plan = folder.plan
    cluster = folder.path / "cluster.json"
    bars = measured_bars(plan, times)
    processes = [measured_process(rank) for rank in plan.ranks]
    if cluster.exists():
        bars += predicted_bars(plan, simulate(plan, read_cluster(cluster)))
        processes = [
            name for rank in plan.ranks for name in (predicted_process(rank), measured_process(rank))
        ]
    write_trace(path, bars, processes)
