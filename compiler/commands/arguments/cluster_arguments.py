"""The arguments of `partc cluster init`."""

from pathlib import Path
from typing import Annotated

import typer

from partc.compiler.commands.command_line import panels
from partc.compiler.machines.make_cluster import Kind
from partc.cost.cluster.detect_gpus import GPU_TYPES


def _complete_types(incomplete: str) -> list[str]:
    return [name for name in GPU_TYPES if name.startswith(incomplete)]


def _complete_sources(incomplete: str) -> list[str]:
    return [name for name in ("machine", "slurm", "mpi-operator") if name.startswith(incomplete)]


NewFile = Annotated[
    Path, typer.Option("-o", "--output", help="The file to write.", rich_help_panel=panels.OUTPUT)
]
ClusterSource = Annotated[
    str,
    typer.Option(
        "--from",
        help="machine, slurm, mpi-operator, or a resource file (`host: gpu ids` on each line).",
        autocompletion=_complete_sources,
    ),
]
Devices = Annotated[
    Kind | None,
    typer.Option(help="What computes. Left out: GPUs where there are any.", rich_help_panel=panels.CLUSTER),
]
WorkersPerHost = Annotated[
    int | None,
    typer.Option(
        min=1, help="Workers on each host's cores, 4 at most by default.", rich_help_panel=panels.CLUSTER
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(min=0, help="GPUs of each host, where nobody tells.", rich_help_panel=panels.CLUSTER),
]
GpuType = Annotated[
    str | None,
    typer.Option(
        help=f"The GPUs' type, where it is not detected: {', '.join(GPU_TYPES)}.",
        autocompletion=_complete_types,
        rich_help_panel=panels.CLUSTER,
    ),
]
Memory = Annotated[
    str,
    typer.Option(help="Memory of each host, such as 256GB.", metavar="SIZE", rich_help_panel=panels.CLUSTER),
]
GbitsPerS = Annotated[
    float | None,
    typer.Option(
        help="Gbit/s between two hosts. Left out: 10, until `partc cluster measure`.",
        rich_help_panel=panels.CLUSTER,
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace a file that is there.", rich_help_panel=panels.OUTPUT)
]
