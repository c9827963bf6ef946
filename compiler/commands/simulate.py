"""`partc simulate`: what a plan would take on a cluster, without running it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table

from partc.compiler.commands.arguments.compile_arguments import ProfileFile
from partc.compiler.commands.arguments.shared_arguments import PlanArgument, TraceArgument
from partc.compiler.commands.console import answer, note, show, tell, working_on
from partc.compiler.commands.results.plans import HostTraffic, LinkLoad, RankLoad, Simulated
from partc.compiler.comparison.price_plan import price_timeline
from partc.compiler.kernel_times.measure_segments import cache_file, measure_segments
from partc.compiler.kernel_times.read_times import read_times
from partc.compiler.output.output_paths import check_output_file
from partc.compiler.report.measure_traffic import LaneLoad, host_traffic, lane_loads
from partc.compiler.report.units import count, percent, seconds, size
from partc.compiler.traces.write_traces import HOW_TO_OPEN, write_predicted_trace
from partc.cost.cluster.cluster import Cluster, ranks_of, read_any_cluster, view_of_session
from partc.cost.simulation.timeline import NOTHING_MEASURED, Measured, Timeline, simulate
from partc.cost.what_if import PricedStep
from partc.runtime.errors import BadCluster
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Plan

EPILOG = f"Example: partc simulate out --trace predicted.json\n\n{HOW_TO_OPEN}"


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the simulator says of one step."""

    plan: Plan
    timeline: Timeline
    host_traffic: dict[str, tuple[float, float]]  # host -> (in, out) bytes
    lanes: tuple[LaneLoad, ...]  # the busiest first
    price: PricedStep  # as --what-if has it

    def render(self) -> Group:
        """Return tables for a terminal."""
        return Group(f"step: {seconds(self.price.step_s)}", self._ranks(), self._hosts(), self._price())

    def record(self, measured_segments: int, trace: str) -> Simulated:
        """Return the document of --json."""
        timeline = self.timeline
        computes_s, communicates_s = timeline.busy_s("compute"), timeline.busy_s("communication")
        ranks = (
            RankLoad(
                rank.rank,
                rank.host,
                rank.device,
                timeline.beside_s.get(rank.rank, 0.0),
                computes_s[rank.rank],
                communicates_s[rank.rank],
                timeline.sent_bytes[rank.rank],
                timeline.received_bytes[rank.rank],
            )
            for rank in self.plan.ranks
        )
        hosts = (HostTraffic(host, *crossing) for host, crossing in self.host_traffic.items())
        links = (LinkLoad(*load.lane, load.bytes, load.seconds) for load in self.lanes)
        return Simulated(
            timeline.step_s, self.price, tuple(ranks), tuple(hosts), tuple(links), measured_segments, trace
        )

    def _ranks(self) -> Table:
        drawn_s = self.timeline.beside_s
        columns = ("computes", "communicates", "sends", "receives")
        table = Table("rank", "device", *(("draws its batch",) if drawn_s else ()), *columns, title="ranks")
        computes_s, communicates_s = self.timeline.busy_s("compute"), self.timeline.busy_s("communication")
        for rank in self.plan.ranks:
            table.add_row(
                str(rank.rank),
                rank.device,
                *((seconds(drawn_s[rank.rank]),) if drawn_s else ()),
                seconds(computes_s[rank.rank]),
                seconds(communicates_s[rank.rank]),
                size(self.timeline.sent_bytes[rank.rank]),
                size(self.timeline.received_bytes[rank.rank]),
            )
        return table

    def _hosts(self) -> Table:
        table = Table("host", "in", "out", title="hosts: bytes that cross their border")
        for host, (received, sent) in self.host_traffic.items():
            table.add_row(host, size(received), size(sent))
        return table

    def _price(self) -> str:
        price = self.price
        busiest = "none, nothing is sent"
        if price.busiest_link:
            busiest = (
                f"{price.busiest_link}, {size(self.lanes[0].bytes)} in {seconds(self.lanes[0].seconds)}, "
                f"{percent(price.busiest_share)} of the step"
            )
        share = percent(price.memory_bytes / price.memory_limit_bytes)
        memory = f"fullest device: {size(price.memory_bytes)}, {share} of what it has"
        speed = "" if price.samples_per_s is None else f"\n{count(price.samples_per_s)} samples/s"
        return f"busiest link: {busiest}\n{memory}{speed}"


def simulate_plan(plan: Plan, cluster: Cluster, measured: Measured = NOTHING_MEASURED) -> Simulation:
    """Play one step of a plan on the cluster it was made for, or on one with the same ranks."""
    timeline = simulate(plan, cluster, measured)
    price = price_timeline(plan, cluster, timeline)
    return Simulation(plan, timeline, host_traffic(plan, cluster), lane_loads(plan, cluster), price)


def simulate_command(
    out: PlanArgument,
    cluster: Annotated[
        Path | None,
        typer.Option("-c", "--cluster", help="Other rates and links for the same hosts and devices."),
    ] = None,
    trace: TraceArgument = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Time the plan's segments on this machine's CPU, unless that was done before."
        ),
    ] = False,
    profile: ProfileFile = None,
) -> None:
    """Predict a step: its time, its bytes, its busiest link and its timeline."""
    if trace is not None:
        check_output_file(trace, (cluster, profile))
    folder = read_plan_folder(out)
    plan = folder.plan
    path = cluster or out / "cluster.json"
    machines = read_any_cluster(path)
    if plan.asynchronous:
        machines = view_of_session(machines)
    _check_same_ranks(plan, machines, path)
    measured = NOTHING_MEASURED if profile is None else Measured(kernels=read_times(profile, machines))
    if measure:
        with working_on("measuring"):
            measured = replace(measure_segments(folder), kernels=measured.kernels)
        note(f"{len(measured.segments)} segments measured; times are kept in {cache_file()}")
    simulation = simulate_plan(plan, machines, measured)
    show(simulation.render())
    if trace is not None:
        write_predicted_trace(trace, plan, simulation.timeline)
        tell(f"timeline -> {trace}   ({HOW_TO_OPEN})")
    answer(simulation.record(len(measured.segments), "" if trace is None else str(trace)))


def _check_same_ranks(plan: Plan, cluster: Cluster, at: Path) -> None:
    planned = [(rank.host, rank.device) for rank in plan.ranks]
    there = [(rank.host, rank.device) for rank in ranks_of(cluster)]
    if planned == there:
        return
    differing = next((pair for pair in planned if pair not in there), None)
    what = f"the plan has a rank on {'/'.join(differing)!r}" if differing else "ranks are ordered otherwise"
    raise BadCluster(
        f"{len(there)} ranks, the plan has {len(planned)}: {what}",
        at=str(at),
        fix="name the same hosts and devices as the plan's cluster.json, or compile for this cluster",
    )
