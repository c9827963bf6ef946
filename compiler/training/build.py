"""Build the training graph of a forward model: loss, gradients, clipping, updates.

forward.onnx ─ normalise ─ rebatch ─ add loss ─ differentiate ─ clip ─ update ─> train.onnx
"""

from collections.abc import Sequence
from pathlib import Path

import onnx

from partc.compiler.training.assemble import assemble, finish_step
from partc.compiler.training.clipping import clip_by_global_norm
from partc.compiler.training.differentiate import differentiate
from partc.compiler.training.forward import OPSET
from partc.compiler.training.node_builder import NodeBuilder
from partc.compiler.training.objective import state_objective
from partc.compiler.training.optimizers import LEARNING_RATE, Optimizer, ReadyGradient, Updates
from partc.compiler.training.rebatch import Batch
from partc.passes.indexed_slices import sum_rows_function, sum_rows_node
from partc.passes.training_graph import Gradient
from partc.runtime.errors import BadUsage


def build_training_graph(
    forward: onnx.ModelProto,
    *,
    loss: str,
    optimizer: Optimizer,
    batch_size: Batch | None = None,
    reinit: int | None = None,
    clip_global_norm: float | None = None,
    ignore_index: int | None = None,
    folder: Path | None = None,
) -> onnx.ModelProto:
    """Return the flat training graph of a forward model.

    `reinit` is the first seed of fresh random parameters. Labels equal to `ignore_index` do not count.
    `folder` is where the forward model's external data lies.
    Raises BadUsage, BadModel, UnsupportedModel.
    """
    _check_options(batch_size, clip_global_norm, reinit)
    objective = state_objective(forward, loss, batch_size, ignore_index)
    graph = objective.model.graph
    build = NodeBuilder(_names(graph))
    gradients = differentiate(build, graph, objective.types, objective.flow, loss=objective.loss, opset=OPSET)
    updates = Updates(build, objective.types, dict(objective.state))
    _update(updates, gradients, optimizer, clip_global_norm)
    return assemble(finish_step(objective, updates, gradients, reinit), folder)


def _check_options(batch_size: Batch | None, clip: float | None, reinit: int | None) -> None:
    wrong = [
        ("--batch-size", batch_size, isinstance(batch_size, int) and batch_size < 1, "a size of at least 1"),
        ("--clip-global-norm", clip, clip is not None and not 0 < clip < float("inf"), "a positive number"),
        ("--reinit", reinit, reinit is not None and not 0 <= reinit < 2**24, "a seed from 0 to 16777215"),
    ]
    for option, value, is_wrong, wanted in wrong:
        if is_wrong:
            raise BadUsage(f"{value!r} is not {wanted}", at=option, fix=f"give {wanted}")


# ---------------------------------------------------------------- updates


def _update(
    updates: Updates, gradients: Sequence[Gradient], optimizer: Optimizer, clip: float | None
) -> None:
    ready = [_summed(updates.build, gradient) for gradient in gradients]
    if clip is not None:
        ready = clip_by_global_norm(updates.build, updates.types, ready, clip)
    for gradient in ready:
        updates.build.scope = f"{gradient.parameter}/update/"
        optimizer.step(updates, gradient)
    updates.build.scope = ""


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


def _names(graph: onnx.GraphProto) -> set[str]:
    values = (*graph.input, *graph.output, *graph.initializer)
    names = {value.name for value in values}
    for node in graph.node:
        names.update((node.name, *node.input, *node.output))
    return names | {LEARNING_RATE}
