"""The arguments of `partc grad`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

OptimizerName = Literal[
    "sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "lamb", "adafactor"
]
FormatName = Literal["flat", "training-info"]

Forward = Annotated[Path, typer.Argument(help="A forward graph.", metavar="FORWARD.onnx")]
StepFile = Annotated[Path, typer.Option("-o", "--output", help="File to write.")]
LossName = Annotated[str, typer.Option(help="softmax_cross_entropy, mse, or the name of a scalar output.")]
OptimizerChoice = Annotated[OptimizerName, typer.Option(help="How gradients become updates.")]
OptimizerSettings = Annotated[
    list[str], typer.Option(help="KEY=VALUE: a setting of the optimizer, such as beta1=0.8, lazy=true.")
]
Rate = Annotated[str, typer.Option(help="A number, or 'fed': a data input learning_rate.")]
ScheduleText = Annotated[
    str,
    typer.Option(help="constant, step:every=N,factor=F, exponential:factor=F, cosine:steps=N,floor=F."),
]
WarmupUpdates = Annotated[int, typer.Option(help="Updates in which the rate rises from 0, before the rest.")]
WeightDecay = Annotated[float | None, typer.Option(help="How strongly parameters shrink.")]
TrainPatterns = Annotated[
    str,
    typer.Option(help="Names that are trained, such as 'head.*'; no others. '*' means all but constants."),
]
FreezePatterns = Annotated[str, typer.Option(help="Names that are not trained, such as 'encoder.*,val_7'.")]
NoDecayPatterns = Annotated[str, typer.Option(help="Names that do not decay, such as '*.bias,*norm*'.")]
Groups = Annotated[list[str], typer.Option(help="PATTERNS:lr=F,weight_decay=F: settings of some parameters.")]
BatchSizeText = Annotated[str, typer.Option(help="Rewrite the batch: N or dynamic.")]
ClipValue = Annotated[float | None, typer.Option(help="Clip every entry of the gradients.")]
ClipNorm = Annotated[float | None, typer.Option(help="Clip each gradient's own norm.")]
ClipGlobalNorm = Annotated[float | None, typer.Option(help="Clip all gradients' common norm.")]
Accumulate = Annotated[int, typer.Option(help="Update on the gradients of so many steps.")]
AverageDecay = Annotated[float | None, typer.Option(help="Average the parameters, with this decay.")]
LossScaleText = Annotated[str, typer.Option(help="A number, or dynamic; masters in float32.")]
IgnoreIndex = Annotated[int | None, typer.Option(help="Labels of this value do not count.")]
Reinit = Annotated[bool, typer.Option("--reinit", help="Draw fresh random parameters.")]
Seed = Annotated[int, typer.Option(help="The first seed of --reinit.")]
Format = Annotated[
    FormatName, typer.Option(help="flat, or the standard's training_info: forward pass and algorithm.")
]
