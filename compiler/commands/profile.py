"""`partc profile`: measure the kernels of a step on this machine, for prices."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from partc.compiler.api import kernels_of
from partc.compiler.commands.arguments import compile_arguments as arguments
from partc.compiler.commands.arguments.parse_options import parse_seconds, parse_sizes
from partc.compiler.commands.arguments.shared_arguments import (
    AxesArgument,
    InitialArgument,
    LossArgument,
    SizesArgument,
    StateArgument,
    TrainArgument,
    graph_options,
)
from partc.compiler.commands.command_line import panels
from partc.compiler.commands.console import answer, note, progress_of, tell, working_on
from partc.compiler.commands.results.machines import Profiled, ProfiledDevice
from partc.compiler.kernel_times.list_kernels import StepKernels
from partc.compiler.kernel_times.measure_kernels import measure_kernels, source_here
from partc.compiler.options import Options
from partc.compiler.output.output_paths import check_output_file
from partc.compiler.report.units import percent
from partc.cost.cluster.cluster import Cluster, ClusterRank, read_any_cluster
from partc.cost.simulation.measured_kernels import (
    MeasuredDevice,
    Profile,
    devices_of,
    encode_profile,
    read_profile,
)
from partc.runtime.errors import BadUsage
from partc.runtime.whole_file import write_whole

EPILOG = "Example: partc profile train.onnx -c examples/cluster-2x2.json -o profile.json"
BUDGET = "120s"
MOST_REASONS = 3  # why kernels cannot be measured, on the terminal
MOST_SHOWN = 60  # characters of a kernel


def profile_command(
    train: TrainArgument,
    cluster: arguments.ClusterFile,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="The profile.json to write, or to add to.", rich_help_panel=panels.OUTPUT
        ),
    ],
    strategy: Annotated[
        str,
        typer.Option(
            help="As of compile: the kernels of its plan. Left out: of any that search finds.",
            rich_help_panel=panels.STRATEGY,
        ),
    ] = "",
    budget: Annotated[
        str, typer.Option(help="How long to measure, such as 60s or 5min.", rich_help_panel=panels.STRATEGY)
    ] = BUDGET,
    batch: arguments.BatchReadingName = None,
    state: StateArgument = [],
    sample_axis: AxesArgument = [],
    loss: LossArgument = "",
    initial: InitialArgument = None,
    size: SizesArgument = [],
) -> None:
    """Measure what the operators of a step take on this machine, in whole and in parts."""
    check_output_file(output, (train, cluster, strategy, initial))
    budget_s = parse_seconds(budget, "--budget")
    profile = read_profile(output) if output.exists() else Profile()
    machines = read_any_cluster(cluster)
    options = Options(
        strategy=strategy or "auto",
        batch=batch,
        sizes=parse_sizes(size),
        options=graph_options(state, sample_axis, loss, initial),
    )
    sources, unreachable = _sources(machines)
    with working_on("listing kernels"):
        step = kernels_of(train, machines, options, with_parts=not strategy)
    for remark in step.remarks:
        note(remark)
    devices = []
    until_s = time.monotonic() + budget_s
    for rank, source in sources:
        before = profile.of_source(source)
        expected_s = step.seconds_on(rank, machines)
        measured_devices = _measure(step, list(expected_s), before, until_s)
        profile = profile.added(measured_devices)
        write_whole(output, encode_profile(profile))
        devices.append(_entry(profile.of_source(source), before, expected_s))
        _tell(devices[-1], output)
    answer(Profiled(str(output), tuple(devices), (*unreachable, *step.remarks)))


def _sources(cluster: Cluster) -> tuple[list[tuple[ClusterRank, MeasuredDevice]], list[str]]:
    """Return a rank of each kind of device and what its times are of here, and what cannot be measured.

    Raises BadUsage where none can.
    """
    sources, unreachable = [], []
    for kind, rank in devices_of(cluster).items():
        if (source := source_here(kind)) is None:
            unreachable.append(
                f"{kind[1]}: this machine has no GPU that onnxruntime can use; the roofline prices it"
            )
            note(unreachable[-1])
        else:
            sources.append((rank, source))
    if not sources:
        raise BadUsage(
            "none of the cluster's devices can be measured here",
            at="--cluster",
            fix="run `partc profile` on a machine that has them, and bring profile.json back",
        )
    return sources, unreachable


def _measure(
    step: StepKernels, keys: Sequence[str], before: MeasuredDevice, until_s: float
) -> MeasuredDevice:
    """Measure what was not measured before, as far as there is time, or until Ctrl-C."""
    missing = [key for key in keys if key not in before.seconds and key not in before.unmeasured]
    seconds: dict[str, float] = {}
    unmeasured: dict[str, str] = {}
    with progress_of(f"measuring {before.profile}", len(missing)) as advance:
        try:
            for done, answer in enumerate(measure_kernels(missing, step, before.device, until_s), 1):
                if answer.seconds is None:
                    unmeasured[answer.key] = answer.unmeasured
                else:
                    seconds[answer.key] = answer.seconds
                advance(done, answer.key[:MOST_SHOWN])
        except KeyboardInterrupt:
            note("interrupted: what was measured is kept")
    return msgspec.structs.replace(before, seconds=seconds, unmeasured=unmeasured)


def _entry(now: MeasuredDevice, before: MeasuredDevice, expected_s: Mapping[str, float]) -> ProfiledDevice:
    """Return how much is known of the step. `expected_s`: of its kernels, by the roofline."""
    known = [key for key in expected_s if key in now.seconds]
    return ProfiledDevice(
        kind=now.kind,
        profile=now.profile,
        device=now.name,
        kernels=len(expected_s),
        known=len(known),
        earlier=sum(key in before.seconds for key in expected_s),
        unmeasured={key: now.unmeasured[key] for key in expected_s if key in now.unmeasured},
        share=sum(map(expected_s.__getitem__, known)) / max(sum(expected_s.values()), 1e-12),
    )


def _tell(device: ProfiledDevice, path: Path) -> None:
    """Say how much is known of the step, and what is left to the roofline."""
    tell(
        f"{device.profile}, {device.device}: {device.known} of {device.kernels} kernels, {device.earlier} of "
        f"them from before; by the roofline they are {percent(device.share)} of the work -> {path}"
    )
    if rest := device.kernels - device.known - len(device.unmeasured):
        tell(f"  {rest} not yet: run it again, or give a larger --budget; the roofline prices them meanwhile")
    if device.unmeasured:
        tell(f"  {len(device.unmeasured)} cannot be run by themselves: the roofline prices them")
    for key, reason in list(device.unmeasured.items())[:MOST_REASONS]:
        tell(f"    {key}: {reason}")
