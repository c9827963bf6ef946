"""Arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from partc.compiler.commands.arguments import parse_axes, parse_pairs
from partc.compiler.options import GraphOptions, Sample
from partc.runtime.checkpoints.manifest import FOLDER

PlanArgument = Annotated[Path, typer.Argument(help="A plan's folder, as compile wrote it.", metavar="OUT")]
CheckpointsOption = Annotated[
    Path | None,
    typer.Option("--checkpoints", help="Their folder; OUT/checkpoints if none is named.", metavar="DIR"),
]
DataArgument = Annotated[
    str, typer.Option(help="FILE.npz, FILE.parquet, a folder of such files, synthetic, or MODULE:FUNC.")
]
TraceArgument = Annotated[
    Path | None,
    typer.Option("--trace", help="A timeline to write, in Chrome's trace event format.", metavar="FILE.json"),
]
OutArgument = Annotated[Path, typer.Option("-o", "--output", help="File or folder to write.")]
TrainArgument = Annotated[Path, typer.Argument(help="A training graph.", metavar="TRAIN.onnx")]
StateArgument = Annotated[
    str, typer.Option(help="Bindings of a foreign graph: IN=OUT,... (variable=next value).")
]
AxesArgument = Annotated[
    list[str], typer.Option("--sample-axis", help="NAME=AXIS of a data input, NAME=none: the same for all.")
]
LossArgument = Annotated[str, typer.Option("--loss", help="The output of a foreign graph that is the loss.")]
InitialArgument = Annotated[
    Path | None, typer.Option(help="A .npz or .safetensors file of the variables' first values.")
]
SizesArgument = Annotated[
    list[str], typer.Option("--size", help="NAME=N: the value of a symbolic size, for pricing and data.")
]
SampleDataArgument = Annotated[
    str,
    typer.Option(
        help="FILE.npz or MODULE:FUNC: training data, from which the rows that a step touches are measured.",
        metavar="DATA",
    ),
]
SampleStepsArgument = Annotated[
    int, typer.Option(min=1, help="How many steps of the sample data are looked at.")
]


def checkpoints_of(out: Path, named: Path | None) -> Path:
    """Return the folder of a plan's checkpoints."""
    return out / FOLDER if named is None else named


def graph_options(state: str, axes: list[str], loss: str, initial: Path | None) -> GraphOptions:
    """Return what the options say about a foreign graph."""
    return GraphOptions(parse_pairs(state, "--state"), parse_axes(axes), loss or None, initial)


def sample_of(data: str, steps: int) -> Sample | None:
    """Return the sample data, None where none is named."""
    return Sample(data, steps) if data else None
