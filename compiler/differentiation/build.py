"""Build the training graph of a forward model: loss, gradients, updates.

forward.onnx ─ normalise ─ rebatch ─ add loss ─ differentiate ─ update ─> train.onnx
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx

from partc.compiler.differentiation.assemble import assemble, finish_step
from partc.compiler.differentiation.differentiate import differentiate
from partc.compiler.differentiation.forward.bring_forward import OPSET
from partc.compiler.differentiation.forward.expand_ops import names_in
from partc.compiler.differentiation.forward.rebatch import BatchSize
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.objective import Objective, state_objective
from partc.compiler.differentiation.operations.follow_operations import follow_operations
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.parameters.decision import describe_choice
from partc.compiler.differentiation.parameters.dropped import find_dropped
from partc.compiler.differentiation.parameters.exporter_merges import undo_merges
from partc.compiler.differentiation.updates.loss_scaling import scale_loss
from partc.compiler.differentiation.updates.make_updates import make_updates
from partc.compiler.differentiation.updates.master_weights import half_parameters, keep_masters
from partc.compiler.differentiation.updates.optimizers import Optimizer
from partc.compiler.differentiation.updates.update_builder import LEARNING_RATE, Updates
from partc.compiler.differentiation.updates.update_options import UpdateOptions
from partc.compiler.model_files.make_dense import make_dense
from partc.compiler.model_files.model_file import check_model
from partc.compiler.planning.stopwatch import paused_collection
from partc.passes.graph.infer_shapes import limited_memory
from partc.runtime.callers_code import callers_code
from partc.runtime.check_arguments import public
from partc.runtime.errors import BadUsage, UnsupportedModel

ROOM_BYTES = 1 << 31  # for what a step takes beside the model, while it is made


@public
@paused_collection()
def build_training_graph(
    forward: onnx.ModelProto,
    *,
    loss: str,
    optimizer: Optimizer,
    batch_size: BatchSize | None = None,
    reinit: int | None = None,
    clip_global_norm: float | None = None,
    ignore_index: int | None = None,
    folder: Path | None = None,
    update: UpdateOptions = UpdateOptions(),  # noqa: B008  # frozen
    parameters: ParameterChoice = ParameterChoice(),  # noqa: B008  # frozen
    tell: Callable[[str], None] | None = None,
) -> onnx.ModelProto:
    """Return the flat training graph of a forward model.

    `reinit` is the first seed of fresh random parameters. Labels equal to `ignore_index` do not count.
    `folder` is where the forward model's external data lies. `clip_global_norm` is short for that of
    `update`. `parameters` chooses what is trained, where the file does not tell; `tell` is given lines that
    say what is trained, what is not, and why. Raises BadUsage, BadModel, UnsupportedModel.
    """
    _check_options(batch_size, reinit, ignore_index, optimizer)
    forward = make_dense(forward)
    check_model(forward, folder)
    forward, copies = undo_merges(forward, folder)
    parameters = parameters.named_as(copies)
    dropped = find_dropped(forward, folder)
    lines = dropped.describe(parameters.may_train)
    parameters = parameters.without(dropped, [tensor.name for tensor in forward.graph.initializer])
    forward = follow_operations(forward)
    with _of_reasonable_size(forward):
        if clip_global_norm is not None:
            update = replace(update, clipping=replace(update.clipping, global_norm=clip_global_norm))
        objective = state_objective(forward, loss, batch_size, ignore_index, parameters, folder)
        if tell is not None:
            for line in (*describe_choice(objective.types, objective.decisions), *lines):
                with callers_code():
                    tell(line)
        if update.loss_scale is not None and (halves := _half_parameters(objective)):
            wide = keep_masters(forward, halves, folder)
            same = ParameterChoice(train=objective.flow.parameters)
            objective = state_objective(wide, loss, batch_size, ignore_index, same, folder)
        graph = objective.model.graph
        build = NodeBuilder(names_in(graph) | {LEARNING_RATE})
        updates = Updates(build, objective.types, dict(objective.state))
        scale = "" if update.loss_scale is None else scale_loss(updates, update.loss_scale)
        gradients = differentiate(
            build,
            graph,
            objective.types,
            objective.flow,
            loss=objective.loss,
            opset=OPSET,
            seed=_seed(build, objective, scale),
        )
        make_updates(updates, gradients, optimizer, update, scale)
        return assemble(finish_step(objective, updates, gradients, reinit), folder)


@contextmanager
def _of_reasonable_size(forward: onnx.ModelProto) -> Iterator[None]:
    """Refuse a step whose constants are beyond all proportion to the model. Raises UnsupportedModel."""
    try:
        with limited_memory(forward, ROOM_BYTES):
            yield
    except MemoryError as error:
        raise UnsupportedModel(
            f"its gradient needs constants of gigabytes, which the model does not hold: {error}",
            at="sizes of the model",
            fix="correct the sizes that the model declares, or export it in smaller ones",
        ) from error


def _check_options(
    batch_size: BatchSize | None, reinit: int | None, ignore_index: int | None, optimizer: Optimizer
) -> None:
    has_step = callable(getattr(optimizer, "step", None)) and not isinstance(optimizer, type)
    wrong = [
        ("optimizer", optimizer, not has_step, "an optimizer, such as partc.SGD(0.1)"),
        ("--batch-size", batch_size, isinstance(batch_size, int) and batch_size < 1, "a size of at least 1"),
        ("--reinit", reinit, reinit is not None and not 0 <= reinit < 2**24, "a seed from 0 to 16777215"),
        ("--ignore-index", ignore_index, abs(ignore_index or 0) >= 2**63, "a label, of 64 bits"),
    ]
    for option, value, is_wrong, expectation in wrong:
        if is_wrong:
            raise BadUsage(f"{value!r} is not {expectation}", at=option, fix=f"give {expectation}")


def _half_parameters(objective: Objective) -> dict[str, int]:
    return half_parameters({name: objective.types[name].element for name in objective.flow.parameters})


def _seed(build: NodeBuilder, objective: Objective, scale: str) -> str:
    """Return the scale in the loss's element type, or nothing."""
    element = objective.types[objective.loss].element
    if not scale or element == onnx.TensorProto.FLOAT:
        return scale
    return build.op("Cast", scale, to=element)
