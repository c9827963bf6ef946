"""The compilation, from a training graph and a cluster to a plan's folder: every stage in its order.

    train.onnx, cluster.json ─ STEP, DECISIONS ─> strategy ─ LOWERING ─> distributed step ─ PLAN ─> out/

A stage is a function of what is known so far (compilation.py), and adds to it.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from partc.compiler import stages
from partc.compiler.compilation import Compilation
from partc.compiler.options import Options
from partc.compiler.output.plan_files import PlanFiles
from partc.compiler.planning.stopwatch import paused_collection
from partc.cost.cluster.cluster import Cluster
from partc.passes.graph.training_graph import TrainingGraph


@dataclass(frozen=True)
class PipelinePhase:
    """Stages whose time is measured together."""

    name: str
    stages: tuple[Callable[[Compilation], None], ...]


KERNELS = PipelinePhase("ask for kernels", (stages.refuse_missing_kernels,))
GRADIENTS = PipelinePhase("find gradients", (stages.find_unrecorded_gradients,))
BATCH = PipelinePhase("choose the batch", (stages.choose_batch, stages.measure_rows))
ANALYSIS = PipelinePhase(
    "analyse",
    (
        stages.fix_open_sizes,
        stages.assign_roles,
        stages.average_over_replicas,
        stages.add_gradient_outputs,
        stages.infer_tensors,
        stages.find_servable_variables,
    ),
)
CHOICE = PipelinePhase(
    "choose a strategy",
    (
        stages.write_named_strategy,
        stages.expand_split_operators,
        stages.describe_choices,
        stages.choose_partitions,
        stages.choose_synchronisation,
    ),
)
ROW_ESTIMATE = PipelinePhase("check the row estimate", (stages.check_row_estimate,))
LOWERING = PipelinePhase("lay out and lower", (stages.lower,))
LOWERING_AS_DECIDED = PipelinePhase(
    "lay out and lower", (stages.expand_split_operators, stages.describe_choices, stages.lower_as_decided)
)
OUTLINE = PipelinePhase("schedule", (stages.outline,))
SCHEDULE = PipelinePhase("schedule and write", (stages.schedule,))
CHECKS = (
    PipelinePhase("load segments", (stages.open_segments,)),
    PipelinePhase("check and simulate", (stages.check_and_simulate, stages.explain_uneven_stages)),
)
CHANGES = PipelinePhase("price changes", (stages.price_changes,))
REPORT = PipelinePhase("report", (stages.describe,))
OPENED = PipelinePhase("await segments", (stages.await_segments,))

ANALYSE = (GRADIENTS, BATCH, ANALYSIS)
DECIDE = (*ANALYSE, CHOICE)
COMPILE = (KERNELS, *DECIDE, LOWERING)  # and then, into a folder:
WRITE = (SCHEDULE, *CHECKS, CHANGES, REPORT, OPENED)


def run(phases: Iterable[PipelinePhase], compilation: Compilation) -> None:
    """Run phases in order. Raises PartcError."""
    for phase in phases:
        with compilation.watch.phase(phase.name):
            for stage in phase.stages:
                stage(compilation)


def compile_graph(training: TrainingGraph, cluster: Cluster, out: Path, options: Options) -> Compilation:
    """Compile into `out` as the options say. Raises PartcError.

    An asynchronous plan is that of one session, which every worker of the cluster has for itself.
    """
    compilation = Compilation(training, cluster, options)
    run((*COMPILE, ROW_ESTIMATE), compilation)
    return write_plan(compilation, out)


@paused_collection()
def write_plan(compilation: Compilation, out: Path) -> Compilation:
    """Write what was decided and lowered into `out`, which appears whole or not at all. Raises PartcError."""
    with PlanFiles(out, compilation.options.force) as compilation.files, ExitStack() as compilation.processes:
        run(WRITE, compilation)
    return compilation
