"""Emit all updates of a step.

gradients ─ sum rows ─ accumulate ─ unscale ─ are they finite? ─ clip ─ schedule ─ optimizer ─ average

Accumulate the gradients of k micro-batches, and let every k-th step's update count.

    micro' = (micro + 1) mod k                  ends = (micro' = 0)
    total = accumulated + g                     accumulated' = Where(ends, 0, total)
    the update reads total / k; every other variable's next value is Where(ends, updated, old)

So k steps equal one on the k micro-batches together, where the loss is a mean over samples. There is no
control flow: the arithmetic of the update is done in every step, and selected away. A sparse gradient is
accumulated into a dense variable, so the update then has a dense gradient.

Exponential moving averages of the parameters.

    average' = decay average + (1 - decay) W'          the first update copies W'

Source: torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay). Every row of a table decays in
every step, so an average writes whole tables even where the update is sparse.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from onnx import TensorProto, helper

from partc.compiler.differentiation.forward.bring_forward import OPSET
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.updates.clipping import clip
from partc.compiler.differentiation.updates.loss_scaling import DynamicScale, all_finite, renew_scale, unscale
from partc.compiler.differentiation.updates.optimizers import Optimizer
from partc.compiler.differentiation.updates.schedules import schedule_rates
from partc.compiler.differentiation.updates.update_builder import ReadyGradient, Updates
from partc.compiler.differentiation.updates.update_options import UpdateOptions, optimizers_of
from partc.passes.graph.training_graph import Gradient
from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN, SUM_ROWS, sum_rows_function
from partc.runtime.errors import BadUsage


def make_updates(
    updates: Updates,
    gradients: Sequence[Gradient],
    optimizer: Optimizer,
    options: UpdateOptions,
    loss_scale: str = "",
) -> None:
    """Give all parameters and slots their next values; `loss_scale` is the tensor that scaled the loss."""
    optimizer_of = optimizers_of((gradient.parameter for gradient in gradients), optimizer, options.groups)
    _check_lazy(gradients, optimizer, options)
    _check_rate_input(optimizer_of.values(), options)
    ready = [_sum_rows(updates.build, gradient) for gradient in gradients]
    ready = _count_updates(updates, ready, options, loss_scale)
    ready = clip(updates, ready, options.clipping)
    schedule_rates(updates, options.schedule, options.warmup)
    for gradient in ready:
        updates.build.scope = f"{gradient.parameter}/update/"
        optimizer_of[gradient.parameter].step(updates, gradient)
    updates.build.scope = ""
    if options.ema is not None:
        average_parameters(updates, optimizer_of, options.ema)


def _count_updates(
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


def _sum_rows(build: NodeBuilder, gradient: Gradient) -> ReadyGradient:
    if gradient.ids is None or gradient.rows is None:
        return ReadyGradient(gradient.parameter, dense=gradient.dense)
    unique_ids = build.fresh(f"{gradient.parameter}/unique_ids")
    sums = build.fresh(f"{gradient.parameter}/summed_rows")
    name = build.fresh(f"{gradient.parameter}/SumRows")
    operands = [gradient.ids, gradient.rows]
    build.nodes.append(
        helper.make_node(SUM_ROWS, operands, [unique_ids, sums], name=name, domain=FUNCTION_DOMAIN)
    )
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


def _check_rate_input(optimizers: Iterable[Optimizer], options: UpdateOptions) -> None:
    has_schedule = options.schedule is not None or options.warmup is not None
    if has_schedule and any(optimizer.lr == "fed" for optimizer in optimizers):
        raise BadUsage(
            "a learning rate that is fed follows no schedule",
            at="--lr fed",
            fix="give the rate as a number, or feed what the schedule would give",
        )


def accumulate(
    updates: Updates, gradients: Sequence[ReadyGradient], count: int
) -> tuple[list[ReadyGradient], str]:
    """Emit the accumulation; return the mean gradients, and the bool scalar that ends an accumulation."""
    build = updates.build
    build.scope = "accumulate/"
    micro_step = updates.variable("micro_step", TensorProto.INT64, (), 0)
    one, limit, zero = (build.constant(np.array(value, np.int64)) for value in (1, count, 0))
    following = updates.set_next(micro_step, "Mod", build.op("Add", micro_step, one), limit)
    ends = build.op("Equal", following, zero)
    means = [_accumulate(updates, gradient, count, ends) for gradient in gradients]
    build.scope = ""
    return means, ends


def _accumulate(updates: Updates, gradient: ReadyGradient, count: int, ends: str) -> ReadyGradient:
    build, parameter = updates.build, gradient.parameter
    accumulated = updates.slot(parameter, "accumulated", 0.0)
    if gradient.dense is not None:
        total = build.op("Add", accumulated, gradient.dense)
    else:
        positions = updates.positions(gradient)
        total = build.op("ScatterND", accumulated, positions, gradient.sums, reduction="add")
    updates.set_next(accumulated, "Where", ends, updates.scalar(0.0, parameter), total)
    return ReadyGradient(parameter, dense=build.op("Div", total, updates.scalar(count, parameter)))


def average_parameters(updates: Updates, parameters: Iterable[str], decay: float) -> None:
    """Give every parameter a variable `<parameter>.average`. Needs the parameters' next values."""
    build = updates.build
    build.scope = "average/"
    one = build.constant(np.array(1, np.int64))
    is_later = build.op("Cast", build.op("Min", updates.steps_done(), one), to=TensorProto.DOUBLE)
    old_weight = build.op("Mul", is_later, build.constant(np.array(decay, np.float64)))
    new = build.op("Sub", build.constant(np.array(1.0, np.float64)), old_weight)
    for parameter in parameters:
        build.scope = f"{parameter}/average/"
        average = updates.slot(parameter, "average", 0.0)
        old = build.op("Mul", updates.cast(old_weight, parameter), average)
        new_term = build.op("Mul", updates.cast(new, parameter), updates.next_values[parameter])
        updates.finish(average, "Add", old, new_term)
    build.scope = ""
