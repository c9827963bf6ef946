"""The command `partc grad`: forward.onnx -> train.onnx."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from partc.compiler.commands.arguments import parse_batch_size
from partc.compiler.commands.console import tell, working_on
from partc.compiler.commands.update_arguments import (
    parse_groups,
    parse_loss_scale,
    parse_optimizer,
    parse_parameters,
    parse_schedule,
)
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.clipping import Clipping
from partc.compiler.differentiation.updates.schedules import Warmup
from partc.compiler.differentiation.updates.update_options import UpdateOptions
from partc.compiler.importing.training_info import export_training_info
from partc.compiler.model_files.model_file import read_model, write_model
from partc.compiler.output.output_paths import check_output_file
from partc.runtime.errors import InputError, naming

EPILOG = "Example: partc grad forward.onnx --loss softmax_cross_entropy --optimizer momentum -o train.onnx"

OptimizerName = Literal[
    "sgd", "momentum", "nesterov", "adagrad", "rmsprop", "adam", "adamw", "lamb", "adafactor"
]
FormatName = Literal["flat", "training-info"]


def grad_command(
    forward: Annotated[Path, typer.Argument(help="A forward graph.", metavar="FORWARD.onnx")],
    out: Annotated[Path, typer.Option("-o", "--output", help="File to write.")],
    loss: Annotated[str, typer.Option(help="softmax_cross_entropy, mse, or the name of a scalar output.")],
    optimizer: Annotated[OptimizerName, typer.Option(help="How gradients become updates.")] = "sgd",
    set_optimizer: Annotated[
        list[str], typer.Option(help="KEY=VALUE: a setting of the optimizer, such as beta1=0.8, lazy=true.")
    ] = [],
    lr: Annotated[str, typer.Option(help="A number, or 'fed': a data input learning_rate.")] = "",
    schedule: Annotated[
        str,
        typer.Option(help="constant, step:every=N,factor=F, exponential:factor=F, cosine:steps=N,floor=F."),
    ] = "",
    warmup: Annotated[int, typer.Option(help="Updates in which the rate rises from 0, before the rest.")] = 0,
    weight_decay: Annotated[float | None, typer.Option(help="How strongly parameters shrink.")] = None,
    train: Annotated[
        str,
        typer.Option(
            help="Names that are trained, such as 'head.*'; no others. '*' means all but constants."
        ),
    ] = "",
    freeze: Annotated[str, typer.Option(help="Names that are not trained, such as 'encoder.*,val_7'.")] = "",
    no_decay: Annotated[str, typer.Option(help="Names that do not decay, such as '*.bias,*norm*'.")] = "",
    group: Annotated[
        list[str], typer.Option(help="PATTERNS:lr=F,weight_decay=F: settings of some parameters.")
    ] = [],
    batch_size: Annotated[str, typer.Option(help="Rewrite the batch: N or dynamic.")] = "",
    clip_value: Annotated[float | None, typer.Option(help="Clip every entry of the gradients.")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Clip each gradient's own norm.")] = None,
    clip_global_norm: Annotated[float | None, typer.Option(help="Clip all gradients' common norm.")] = None,
    accumulate: Annotated[int, typer.Option(help="Update on the gradients of so many steps.")] = 1,
    ema: Annotated[float | None, typer.Option(help="Average the parameters, with this decay.")] = None,
    loss_scale: Annotated[str, typer.Option(help="A number, or dynamic; masters in float32.")] = "",
    ignore_index: Annotated[int | None, typer.Option(help="Labels of this value do not count.")] = None,
    reinit: Annotated[bool, typer.Option("--reinit", help="Draw fresh random parameters.")] = False,
    seed: Annotated[int, typer.Option(help="The first seed of --reinit.")] = 0,
    format: Annotated[
        FormatName, typer.Option(help="flat, or the standard's training_info: forward pass and algorithm.")
    ] = "flat",
) -> None:
    """Differentiate a forward graph: loss, gradients, clipping, updates."""
    check_output_file(out)
    update = UpdateOptions(
        clipping=Clipping(clip_value, clip_norm, clip_global_norm),
        schedule=parse_schedule(schedule),
        warmup=Warmup(warmup) if warmup else None,
        groups=parse_groups(no_decay, group),
        accumulate=accumulate,
        ema=ema,
        loss_scale=parse_loss_scale(loss_scale),
    )
    lines: list[str] = []
    with working_on("differentiating"), naming(forward, InputError):
        step = build_training_graph(
            read_model(forward),
            loss=loss,
            optimizer=parse_optimizer(optimizer, lr, set_optimizer, weight_decay),
            batch_size=parse_batch_size(batch_size),
            reinit=seed if reinit else None,
            ignore_index=ignore_index,
            folder=forward.parent,
            update=update,
            parameters=parse_parameters(train, freeze),
            tell=lines.append,
        )
        write_model(export_training_info(step) if format == "training-info" else step, out)
    for line in lines:
        tell(line)
    tell(f"{len(step.graph.node)} nodes -> {out}")
