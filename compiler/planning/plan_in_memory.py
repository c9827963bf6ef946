"""Make the plan of an ordered step, with as many micro-batches under way as devices have room for."""

from collections.abc import Mapping
from dataclasses import replace

from partc.compiler.output.plan_files import PlanFiles
from partc.compiler.planning.build_plan import build_plan
from partc.compiler.planning.order_step import OrderedStep
from partc.cost.cluster.cluster import Cluster
from partc.cost.simulation.measured_kernels import KernelTimes
from partc.cost.simulation.memory import DeviceMemory, check_memory
from partc.cost.strategy import Strategy
from partc.passes.analysis import Analysis
from partc.runtime.errors import DoesNotFit
from partc.runtime.plan.program import Plan


def plan_in_memory(
    analysis: Analysis,
    ordered: OrderedStep,
    strategy: Strategy,
    cluster: Cluster,
    sizes: Mapping[str, int],
    files: PlanFiles | None,
    times: KernelTimes | None = None,
) -> tuple[OrderedStep, Plan, tuple[DeviceMemory, ...]]:
    """Return the step as it was planned, its plan, and the memory that each rank needs.

    Segments are written where `build_plan` writes them. Raises DoesNotFit.
    """
    plan = build_plan(analysis, ordered, strategy, cluster, sizes, files, times)
    try:
        return ordered, plan, check_memory(plan, cluster)
    except DoesNotFit:
        if ordered.fewer is None:
            raise
    ordered = replace(ordered, turns=ordered.fewer, fewer=None)
    if files is not None:
        files.discard_segments()
    plan = build_plan(analysis, ordered, strategy, cluster, sizes, files, times)
    return ordered, plan, check_memory(plan, cluster)
