"""Read one of two steps that are compared: a plan's folder, or the measured.json of its run."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from partc.compiler.comparison.account_step import account_of
from partc.compiler.kernel_times.read_times import times_of_plan
from partc.compiler.output.output_paths import MEASURED
from partc.cost.cluster.cluster import Cluster, read_cluster, view_of_session
from partc.cost.comparison import ComparedSide, SideKind
from partc.cost.simulation.instruction_times import time_instructions
from partc.cost.simulation.memory import memory_of
from partc.cost.simulation.timeline import Measured
from partc.cost.step_account import RUN_FORMAT, MeasuredRun, StepAccount
from partc.runtime.data.batches import samples_of_step
from partc.runtime.errors import BadPlan
from partc.runtime.plan.plan_folder import PlanFolder, open_plan_folder
from partc.runtime.plan.plan_json import NOT_DECODED
from partc.runtime.plan.program import Plan


@dataclass(frozen=True)
class Side:
    """A step, and the plan that it is of. `run`: where it was measured."""

    record: ComparedSide
    folder: PlanFolder
    cluster: Cluster
    run: MeasuredRun | None = None

    @property
    def plan(self) -> Plan:
        """Return the plan."""
        return self.folder.plan


def read_side(path: Path) -> Side:
    """Return a plan's predicted step, or the measured one of its measured.json. Raises BadPlan."""
    is_run = path.suffix == ".json"
    folder = open_plan_folder(path.parent if is_run else path)
    cluster = read_cluster(folder.path / "cluster.json")
    if folder.plan.asynchronous:
        cluster = view_of_session(cluster)
    run = read_run(path, folder.plan) if is_run else None
    account = _predicted(folder, cluster) if run is None else run.measured
    memory = max(need.needed_bytes for need in memory_of(folder.plan, cluster))
    samples = samples_of_step(folder.plan)
    kind: SideKind = "predicted" if run is None else "measured"
    return Side(ComparedSide(str(path), kind, account, samples, memory), folder, cluster, run)


def _predicted(folder: PlanFolder, cluster: Cluster) -> StepAccount:
    plan, measured = folder.plan, Measured(kernels=times_of_plan(folder.path, cluster))
    timeline, times = time_instructions(plan, cluster, measured)
    return account_of(plan, cluster, {rank: (step,) for rank, step in times.items()}, timeline.step_s)


def run_of(folder: Path) -> Path:
    """Return the path of what the last run of a plan measured. Raises BadPlan where there is none."""
    path = folder / MEASURED
    if not path.exists():
        raise BadPlan(
            "nothing to compare the plan with: no run of it was measured",
            at=str(path),
            fix=f"train it with `partc run {folder}`, or name a second plan",
        )
    return path


def read_run(path: Path, plan: Plan) -> MeasuredRun:
    """Read what a run of a plan measured. Raises BadPlan."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=MeasuredRun)
    except OSError as error:
        raise BadPlan(
            f"cannot be read: {error.strerror}",
            at=str(path),
            fix="give a measured.json that `partc run` wrote",
        ) from error
    except NOT_DECODED as error:
        fix = "let `partc run` write it anew"
        raise BadPlan(f"not what a run measured: {error}", at=str(path), fix=fix) from error
    if run.format != RUN_FORMAT or run.plan_sha256 != plan.sha256:
        raise BadPlan(
            "a run of another plan: this one was compiled again, or edited, since",
            at=str(path),
            fix="run the plan again",
        )
    return run
