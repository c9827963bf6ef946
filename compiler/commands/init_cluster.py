"""`partc cluster init`: a cluster file of what this machine, a batch system or a resource file tells."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from partc.compiler.commands.arguments import parse_bytes
from partc.compiler.commands.command_line import panels
from partc.compiler.commands.console import answer, note, tell
from partc.compiler.commands.results.machines import ClusterWritten
from partc.compiler.machines.check_devices import unusable_gpus
from partc.compiler.machines.make_cluster import Kind, Wishes, make_cluster
from partc.compiler.output.output_paths import check_output_file
from partc.compiler.report.units import plural
from partc.cost.cluster.cluster import encode_cluster
from partc.cost.cluster.detect_gpus import GPU_TYPES
from partc.runtime.errors import BadUsage

EPILOG = """Without --from: the hosts of Slurm or of the MPI operator, within a job; else this machine.

Example: partc cluster init -o cluster.json"""


def _complete_types(incomplete: str) -> list[str]:
    return [name for name in GPU_TYPES if name.startswith(incomplete)]


def _complete_sources(incomplete: str) -> list[str]:
    return [name for name in ("machine", "slurm", "mpi-operator") if name.startswith(incomplete)]


def init_command(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The file to write.", rich_help_panel=panels.OUTPUT)
    ] = Path("cluster.json"),
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="machine, slurm, mpi-operator, or a resource file (`host: gpu ids` on each line).",
            autocompletion=_complete_sources,
        ),
    ] = "auto",
    devices: Annotated[
        Kind | None,
        typer.Option(
            help="What computes. Left out: GPUs where there are any.", rich_help_panel=panels.CLUSTER
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Workers on each host's cores, 4 at most by default.", rich_help_panel=panels.CLUSTER
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs of each host, where nobody tells.", rich_help_panel=panels.CLUSTER),
    ] = None,
    gpu_type: Annotated[
        str | None,
        typer.Option(
            help=f"The GPUs' type, where it is not detected: {', '.join(GPU_TYPES)}.",
            autocompletion=_complete_types,
            rich_help_panel=panels.CLUSTER,
        ),
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            help="Memory of each host, such as 256GB.", metavar="SIZE", rich_help_panel=panels.CLUSTER
        ),
    ] = "",
    network: Annotated[
        float | None,
        typer.Option(
            help="Gbit/s between two hosts. Left out: 10, until `partc cluster measure`.",
            rich_help_panel=panels.CLUSTER,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file that is there.", rich_help_panel=panels.OUTPUT)
    ] = False,
) -> None:
    """Write a cluster file of this machine, a batch system's hosts, or a resource file."""
    check_output_file(output)
    if output.exists() and not force:
        raise BadUsage("a file is there already", at=str(output), fix="name another with -o, or give --force")
    if network is not None and not 0 < network < 1e6:
        raise BadUsage(
            f"{network} Gbit/s", at="--network", fix="give what is between two hosts: 10, 100, 400"
        )
    wishes = Wishes(
        devices, workers, gpus, gpu_type, parse_bytes(memory, "--memory"), network and network * 1e9 / 8
    )
    made = make_cluster(source, wishes)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(encode_cluster(made.cluster))
    profiles = Counter(device.profile for host in made.cluster.hosts for device in host.devices)
    counted = ", ".join(f"{count} {profile}" for profile, count in profiles.items())
    tell(f"{plural(len(made.cluster.hosts), 'host')}, {counted}, by {made.source} -> {output}")
    for line in made.assumed:
        note(f"  assumed: {line}")
    warnings = tuple(unusable_gpus(made.cluster))
    for line in warnings:
        tell(f"warning: {line}")
    if len(made.cluster.hosts) > 1:
        note(f"  `partc cluster measure {output} -o measured.json` finds how quick links and cores are")
    answer(
        ClusterWritten(
            output=str(output),
            source=made.source,
            hosts=len(made.cluster.hosts),
            devices=profiles.total(),
            profiles=dict(profiles),
            assumed=made.assumed,
            warnings=warnings,
        )
    )
