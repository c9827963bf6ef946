"""Price one step of a plan: its time, what passes its busiest link, what its fullest device holds."""

from partc.compiler.report.measure_traffic import lane_loads, lane_name
from partc.cost.cluster.cluster import Cluster
from partc.cost.simulation.memory import memory_of
from partc.cost.simulation.timeline import NOTHING_MEASURED, Measured, Timeline, simulate
from partc.cost.what_if import PricedStep
from partc.runtime.data.batches import samples_of_step
from partc.runtime.plan.program import Plan


def price_plan(plan: Plan, cluster: Cluster, measured: Measured = NOTHING_MEASURED) -> PricedStep:
    """Return the price of a step on a cluster that has the plan's ranks."""
    return price_timeline(plan, cluster, simulate(plan, cluster, measured))


def price_timeline(plan: Plan, cluster: Cluster, timeline: Timeline) -> PricedStep:
    """Return the price of a step that is simulated already."""
    samples, step_s = samples_of_step(plan), timeline.step_s
    busiest = next(iter(lane_loads(plan, cluster)), None)
    fullest = max(memory_of(plan, cluster), key=lambda need: need.needed_bytes / need.limit_bytes)
    return PricedStep(
        step_s,
        samples,
        samples / step_s if samples is not None and step_s else None,
        lane_name(busiest.lane) if busiest is not None else "",
        busiest.seconds / step_s if busiest is not None and step_s else 0.0,
        fullest.needed_bytes,
        fullest.limit_bytes,
    )
