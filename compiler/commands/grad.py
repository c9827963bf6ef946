"""The command `partc grad`: forward.onnx -> train.onnx."""

from partc.compiler.commands.arguments import grad_arguments as arguments
from partc.compiler.commands.arguments.parse_options import parse_batch_size, refuse_without
from partc.compiler.commands.arguments.parse_update_options import (
    parse_groups,
    parse_loss_scale,
    parse_optimizer,
    parse_parameters,
    parse_schedule,
    parse_warmup,
)
from partc.compiler.commands.console import answer, note, tell, working_on
from partc.compiler.commands.results.models import StepWritten
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.clipping import Clipping
from partc.compiler.differentiation.updates.update_options import UpdateOptions
from partc.compiler.importing.training_info import export_training_info
from partc.compiler.model_files.model_file import read_model
from partc.compiler.model_files.write_model import write_model
from partc.compiler.output.output_paths import check_output_file
from partc.runtime.errors import InputError, naming

EPILOG = "Example: partc grad forward.onnx --loss softmax_cross_entropy --optimizer momentum -o train.onnx"


def grad_command(
    forward: arguments.Forward,
    out: arguments.StepFile,
    loss: arguments.LossName,
    optimizer: arguments.OptimizerChoice = "sgd",
    set_optimizer: arguments.OptimizerSettings = [],
    lr: arguments.Rate = "",
    schedule: arguments.ScheduleText = "",
    warmup: arguments.WarmupUpdates = 0,
    weight_decay: arguments.WeightDecay = None,
    train: arguments.TrainPatterns = "",
    freeze: arguments.FreezePatterns = "",
    no_decay: arguments.NoDecayPatterns = "",
    group: arguments.GroupSettings = [],
    batch_size: arguments.BatchSizeText = "",
    clip_value: arguments.ClipValue = None,
    clip_norm: arguments.ClipNorm = None,
    clip_global_norm: arguments.ClipGlobalNorm = None,
    accumulate: arguments.Accumulate = 1,
    ema: arguments.AverageDecay = None,
    loss_scale: arguments.LossScaleText = "",
    ignore_index: arguments.IgnoreIndex = None,
    reinit: arguments.Reinit = False,
    seed: arguments.Seed = 0,
    format: arguments.Format = "flat",
) -> None:
    """Differentiate a forward graph: loss, gradients, clipping, updates."""
    check_output_file(out, (forward,))
    settings = parse_optimizer(optimizer, lr, set_optimizer, weight_decay)
    cross_entropy = "softmax_cross_entropy"
    refuse_without("--ignore-index", ignore_index, f"--loss {cross_entropy}", loss == cross_entropy)
    refuse_without("--seed", seed or None, "--reinit", reinit)
    refuse_without("--no-decay", no_decay or None, "--weight-decay", settings.weight_decay > 0)
    update = UpdateOptions(
        clipping=Clipping(clip_value, clip_norm, clip_global_norm),
        schedule=parse_schedule(schedule),
        warmup=parse_warmup(warmup),
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
            optimizer=settings,
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
        note(line)
    tell(f"{len(step.graph.node)} nodes -> {out}")
    answer(StepWritten(len(step.graph.node), str(out), tuple(lines)))
