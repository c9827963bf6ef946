"""The arguments of `partc grad`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from partc.compiler.commands.command_line import panels
from partc.compiler.commands.command_line.completion import GRAPHS, complete_files

OptimizerName = Literal[
    "sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "lamb", "adafactor"
]
FormatName = Literal["flat", "training-info"]

Forward = Annotated[
    Path,
    typer.Argument(help="A forward graph.", metavar="FORWARD.onnx", autocompletion=complete_files(*GRAPHS)),
]
StepFile = Annotated[
    Path, typer.Option("-o", "--output", help="File to write.", rich_help_panel=panels.OUTPUT)
]
LossName = Annotated[
    str,
    typer.Option(
        help="softmax_cross_entropy, mse, or the name of a scalar output.", rich_help_panel=panels.STEP
    ),
]
OptimizerChoice = Annotated[
    OptimizerName, typer.Option(help="How gradients become updates.", rich_help_panel=panels.OPTIMIZER)
]
OptimizerSettings = Annotated[
    list[str],
    typer.Option(
        help="KEY=VALUE: a setting of the optimizer, such as beta1=0.8, lazy=true.",
        rich_help_panel=panels.OPTIMIZER,
    ),
]
Rate = Annotated[
    str,
    typer.Option(help="A number, or 'fed': a data input learning_rate.", rich_help_panel=panels.OPTIMIZER),
]
ScheduleText = Annotated[
    str,
    typer.Option(
        help="constant, step:every=N,factor=F, exponential:factor=F, cosine:steps=N,floor=F.",
        rich_help_panel=panels.OPTIMIZER,
    ),
]
WarmupUpdates = Annotated[
    int,
    typer.Option(
        help="Updates in which the rate rises from 0, before the rest.", rich_help_panel=panels.OPTIMIZER
    ),
]
WeightDecay = Annotated[
    float | None, typer.Option(help="How strongly parameters shrink.", rich_help_panel=panels.OPTIMIZER)
]
TrainPatterns = Annotated[
    str,
    typer.Option(
        help="Names that are trained, such as 'head.*'; no others. '*' means all but constants.",
        rich_help_panel=panels.TRAINED,
    ),
]
FreezePatterns = Annotated[
    str,
    typer.Option(
        help="Names that are not trained, such as 'encoder.*,val_7'.", rich_help_panel=panels.TRAINED
    ),
]
NoDecayPatterns = Annotated[
    str,
    typer.Option(help="Names that do not decay, such as '*.bias,*norm*'.", rich_help_panel=panels.OPTIMIZER),
]
GroupSettings = Annotated[
    list[str],
    typer.Option(
        help="PATTERNS:lr=F,weight_decay=F: settings of some parameters.", rich_help_panel=panels.OPTIMIZER
    ),
]
BatchSizeText = Annotated[
    str, typer.Option(help="Rewrite the batch: N or dynamic.", rich_help_panel=panels.STEP)
]
ClipValue = Annotated[
    float | None, typer.Option(help="Clip every entry of the gradients.", rich_help_panel=panels.GRADIENTS)
]
ClipNorm = Annotated[
    float | None, typer.Option(help="Clip each gradient's own norm.", rich_help_panel=panels.GRADIENTS)
]
ClipGlobalNorm = Annotated[
    float | None, typer.Option(help="Clip all gradients' common norm.", rich_help_panel=panels.GRADIENTS)
]
Accumulate = Annotated[
    int, typer.Option(help="Update on the gradients of so many steps.", rich_help_panel=panels.OPTIMIZER)
]
AverageDecay = Annotated[
    float | None,
    typer.Option(help="Average the parameters, with this decay.", rich_help_panel=panels.OPTIMIZER),
]
LossScaleText = Annotated[
    str, typer.Option(help="A number, or dynamic; masters in float32.", rich_help_panel=panels.LIMITS)
]
IgnoreIndex = Annotated[
    int | None, typer.Option(help="Labels of this value do not count.", rich_help_panel=panels.STEP)
]
Reinit = Annotated[
    bool, typer.Option("--reinit", help="Draw fresh random parameters.", rich_help_panel=panels.TRAINED)
]
Seed = Annotated[int, typer.Option(help="The first seed of --reinit.", rich_help_panel=panels.TRAINED)]
Format = Annotated[
    FormatName,
    typer.Option(
        help="flat, or the standard's training_info: forward pass and algorithm.",
        rich_help_panel=panels.OUTPUT,
    ),
]
