"""Emit all updates of a step.

gradients ─ sum rows ─ accumulate ─ unscale ─ are they finite? ─ clip ─ schedule ─ optimizer ─ average
"""

from collections.abc import Iterable, Sequence

from partc.compiler.training.forward import OPSET
from partc.compiler.training.node_builder import NodeBuilder
from partc.compiler.training.optimizers import Optimizer
from partc.compiler.training.updates.accumulation import accumulate
from partc.compiler.training.updates.averaging import average_parameters
from partc.compiler.training.updates.clipping import clip
from partc.compiler.training.updates.loss_scaling import DynamicScale, all_finite, renew_scale, unscale
from partc.compiler.training.updates.parameter_groups import optimizers_of
from partc.compiler.training.updates.schedules import schedule_rates
from partc.compiler.training.updates.update_builder import ReadyGradient, Updates
from partc.compiler.training.updates.update_options import UpdateOptions
from partc.passes.indexed_slices import sum_rows_function, sum_rows_node
from partc.passes.training_graph import Gradient
from partc.runtime.errors import BadUsage


def make_updates(
    updates: Updates,
    gradients: Sequence[Gradient],
    optimizer: Optimizer,
    options: UpdateOptions,
    loss_scale: str = "",
) -> None:
    """Give all parameters and slots their next values; `loss_scale` is the tensor that scaled the loss."""
    chosen = optimizers_of((gradient.parameter for gradient in gradients), optimizer, options.groups)
    _check_lazy(gradients, optimizer, options)
    _check_fed(chosen.values(), options)
    ready = [_summed(updates.build, gradient) for gradient in gradients]
    ready = _counted(updates, ready, options, loss_scale)
    ready = clip(updates, ready, options.clipping)
    schedule_rates(updates, options.schedule, options.warmup)
    for gradient in ready:
        updates.build.scope = f"{gradient.parameter}/update/"
        chosen[gradient.parameter].step(updates, gradient)
    updates.build.scope = ""
    if options.ema is not None:
        average_parameters(updates, chosen, options.ema)


def _counted(
    updates: Updates, gradients: list[ReadyGradient], options: UpdateOptions, loss_scale: str
) -> list[ReadyGradient]:
    """Accumulate and unscale, and say in `updates.applies` whether the step's update counts."""
    ends = ""
    if options.accumulate > 1:
        gradients, ends = accumulate(updates, gradients, options.accumulate)
    updates.applies = ends
    if options.loss_scale is None:
        return gradients
    gradients = unscale(updates, gradients, loss_scale)
    if isinstance(options.loss_scale, DynamicScale):
        finite = all_finite(updates, gradients)
        renew_scale(updates, loss_scale, options.loss_scale, finite, ends)
        updates.applies = updates.build.op("And", finite, ends) if ends else finite
    return gradients


def _summed(build: NodeBuilder, gradient: Gradient) -> ReadyGradient:
    if gradient.ids is None or gradient.rows is None:
        return ReadyGradient(gradient.parameter, dense=gradient.dense)
    unique_ids = build.fresh(f"{gradient.parameter}/unique_ids")
    sums = build.fresh(f"{gradient.parameter}/summed_rows")
    name = build.fresh(f"{gradient.parameter}/SumRows")
    build.nodes.append(sum_rows_node(gradient.ids, gradient.rows, unique_ids, sums, name))
    function = sum_rows_function(OPSET)
    build.functions.setdefault(function.name, function)
    return ReadyGradient(gradient.parameter, unique_ids=unique_ids, sums=sums)


def _check_lazy(gradients: Sequence[Gradient], optimizer: Optimizer, options: UpdateOptions) -> None:
    is_sparse = any(gradient.is_sparse for gradient in gradients)
    if options.accumulate > 1 and is_sparse and getattr(optimizer, "lazy", False):
        raise BadUsage(
            "a lazy optimizer does not know which rows several micro-batches read",
            at="--accumulate",
            fix="leave lazy out: the update is then exact for all rows; or do not accumulate",
        )


def _check_fed(optimizers: Iterable[Optimizer], options: UpdateOptions) -> None:
    has_schedule = options.schedule is not None or options.warmup is not None
    if has_schedule and any(optimizer.lr == "fed" for optimizer in optimizers):
        raise BadUsage(
            "a learning rate that is fed follows no schedule",
            at="--lr fed",
            fix="give the rate as a number, or feed what the schedule would give",
        )
