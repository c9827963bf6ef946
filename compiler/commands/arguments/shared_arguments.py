"""Arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from partc.compiler.commands.arguments.parse_options import parse_axes, parse_pairs, refuse_without
from partc.compiler.commands.command_line import panels
from partc.compiler.commands.command_line.completion import (
    GRAPHS,
    complete_data,
    complete_files,
    complete_plans,
)
from partc.compiler.options import SAMPLE_STEPS, GraphOptions, Sample
from partc.runtime.checkpoints.manifest import FOLDER

PlanArgument = Annotated[
    Path,
    typer.Argument(
        help="A plan's folder, as compile wrote it.", metavar="OUT", autocompletion=complete_plans
    ),
]
CheckpointsOption = Annotated[
    Path | None,
    typer.Option(
        "--checkpoints",
        help="Their folder; OUT/checkpoints if none is named.",
        metavar="DIR",
        rich_help_panel=panels.CHECKPOINTS,
    ),
]
DataArgument = Annotated[
    str,
    typer.Option(
        help="FILE.npz, FILE.parquet, a folder of such files, synthetic, or MODULE:FUNC.",
        rich_help_panel=panels.DATA,
        autocompletion=complete_data,
    ),
]
TraceArgument = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="A timeline to write, in Chrome's trace event format.",
        metavar="FILE.json",
        rich_help_panel=panels.WATCHED,
    ),
]
OutArgument = Annotated[
    Path, typer.Option("-o", "--output", help="File or folder to write.", rich_help_panel=panels.OUTPUT)
]
TrainArgument = Annotated[
    Path,
    typer.Argument(help="A training graph.", metavar="TRAIN.onnx", autocompletion=complete_files(*GRAPHS)),
]
StateArgument = Annotated[
    list[str],
    typer.Option(
        help="Bindings of a foreign graph: IN=OUT,... (variable=next value).", rich_help_panel=panels.STEP
    ),
]
AxesArgument = Annotated[
    list[str],
    typer.Option(
        "--sample-axis",
        help="NAME=AXIS of a data input, NAME=none: the same for all.",
        rich_help_panel=panels.STEP,
    ),
]
LossArgument = Annotated[
    str,
    typer.Option(
        "--loss", help="The output of a foreign graph that is the loss.", rich_help_panel=panels.STEP
    ),
]
InitialArgument = Annotated[
    Path | None,
    typer.Option(
        help="A .npz or .safetensors file of the variables' first values.",
        rich_help_panel=panels.STEP,
        autocompletion=complete_files(".npz", ".safetensors"),
    ),
]
SizesArgument = Annotated[
    list[str],
    typer.Option(
        "--size",
        help="NAME=N: the value of a symbolic size, for pricing and data. Where more than samples is divided "
        "the plan is for it alone.",
        rich_help_panel=panels.STEP,
    ),
]
SampleDataArgument = Annotated[
    str,
    typer.Option(
        help="FILE.npz or MODULE:FUNC: training data, from which the rows that a step touches are measured.",
        metavar="DATA",
        rich_help_panel=panels.STEP,
        autocompletion=complete_data,
    ),
]
SampleStepsArgument = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"How many steps of the sample data are looked at: {SAMPLE_STEPS}, if nothing is said.",
        rich_help_panel=panels.STEP,
    ),
]


def checkpoints_of(out: Path, folder: Path | None) -> Path:
    """Return the folder of a plan's checkpoints."""
    return out / FOLDER if folder is None else folder


def graph_options(state: list[str], axes: list[str], loss: str, initial: Path | None) -> GraphOptions:
    """Return what the options say about a foreign graph."""
    return GraphOptions(parse_pairs(",".join(state), "--state"), parse_axes(axes), loss or None, initial)


def sample_of(data: str, steps: int | None) -> Sample | None:
    """Return the sample data, None where none is named. Raises BadUsage of steps without data."""
    refuse_without("--sample-steps", steps, "--sample-data", bool(data))
    return Sample(data, steps or SAMPLE_STEPS) if data else None
