"""Give a forward graph another batch size, also where the old one is baked into constants.

    inputs     the sample axis of every data input gets the new size, or the symbol "batch"
    Reshape    a constant target that holds the batch: found by where the batch lies in the input;
               where a 0 takes its place, allowzero is cleared: with it, 0 is a size
    Expand     a constant target that holds the batch: 1 there, for Expand keeps what the input has

The batch is followed by shapes, never by value: a graph is inferred at its own batch and at another,
and the sizes that differ are the batch's. (A hidden size of 8 is not mistaken for a batch of 8.)
"""

from collections.abc import Mapping
from typing import Literal

import numpy as np
import onnx
from onnx import numpy_helper

from partc.compiler.differentiation.forward.batch_axes import SYMBOLIC, BatchAxes, know_sizes
from partc.compiler.differentiation.forward.held_batch import refuse_held_batch
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.parameters.find_parameters import data_inputs
from partc.compiler.differentiation.sizes.fold_sizes import opset_of
from partc.compiler.differentiation.sizes.knowledge import Knowledge
from partc.compiler.differentiation.tensor_types import (
    Shape,
    Types,
    check_shapes,
    infer_types,
    small_constants,
    type_of,
    without_large_values,
)
from partc.runtime.errors import BadModel, BadUsage, UnsupportedModel

BATCH = "batch"
PROBE = 1009  # a prime that no model has as a size: the batch at which shapes are compared
DIVISIBLE = 720720  # by all numbers to 16: two views of a sample, or halves, may be what a batch has
BatchSize = int | Literal["dynamic"]


def rebatch(model: onnx.ModelProto, batch: BatchSize, sample_axes: Mapping[str, int | None]) -> None:
    """Rewrite the model in place. Raises BadUsage, UnsupportedModel."""
    old = _current_batch(model, sample_axes)
    if isinstance(old, int) and old != batch:
        _free_constants(model, old, sample_axes)
    _set_batch(model, BATCH if batch == "dynamic" else batch, sample_axes)
    check_batch_is_free(model)


def _current_batch(model: onnx.ModelProto, sample_axes: Mapping[str, int | None]) -> int | str | None:
    """Return the batch that all inputs agree on: a number, or anything else when it is symbolic."""
    sizes = {}
    for value in data_inputs(model.graph):
        axis = sample_axes.get(value.name)
        shape = type_of(value).shape
        if axis is not None and shape is not None:
            sizes[value.name] = shape[axis]
    numbers = {size for size in sizes.values() if isinstance(size, int)}
    if len(numbers) > 1:
        raise BadUsage(
            f"the data inputs disagree on the batch, which is taken for their first axis: {sizes}",
            at="--batch-size",
            fix="export the model with the wanted batch, or with a symbolic one (dynamic_shapes, or "
            "dynamic_axes, of torch.onnx.export): the one symbol of each input tells its sample axis",
        )
    return numbers.pop() if numbers else None


def _set_batch(model: onnx.ModelProto, batch: int | str, sample_axes: Mapping[str, int | None]) -> None:
    for value in data_inputs(model.graph):
        axis = sample_axes.get(value.name)
        if axis is None:
            continue
        dimension = value.type.tensor_type.shape.dim[axis]
        dimension.Clear()
        if isinstance(batch, int):
            dimension.dim_value = batch
        else:
            dimension.dim_param = batch
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]


# ---------------------------------------------------------------- constants


def _free_constants(model: onnx.ModelProto, old: int, sample_axes: Mapping[str, int | None]) -> None:
    """Rewrite every constant target that holds the batch, from the first to the last."""
    before = know_sizes(model)
    _set_batch(model, PROBE, sample_axes)
    constants = small_constants(model.graph)
    names = NodeBuilder((*constants, *before.types))
    known = Knowledge(model.graph, opset_of(model), infer_types(model))
    for node in model.graph.node:
        if node.op_type in ("Reshape", "Expand") and node.input[1] in constants:
            now = known.types[node.input[0]].shape if node.input[0] in known.types else None
            shapes = before.shape(node.input[0]), now, before.shape(node.output[0])
            target = _free_target(node, constants[node.input[1]], shapes, old)
            if target is not None:
                replacement = numpy_helper.from_array(target, names.fresh(f"{node.input[1]}.any_batch"))
                model.graph.initializer.append(replacement)
                known.learn(replacement.name, replacement)
                node.input[1] = replacement.name
                _let_zero_copy(node)
        known.saw(node)
    after = know_sizes(model)
    _check_batch_survives(model, before.types, after.types, old)
    refuse_held_batch(model.graph, BatchAxes(old, before, after))


def _free_target(
    node: onnx.NodeProto,
    target: np.ndarray,
    shapes: tuple[Shape | None, Shape | None, Shape | None],
    old: int,
) -> np.ndarray | None:
    """Return a target that fits any batch, or None where the old one does.

    `shapes`: of the input at the old batch and at another, and of the output at the old one.
    """
    was, now, result = (shape if shape is not None and _is_static(shape) else None for shape in shapes)
    if was is None or now is None or result is None:
        return None
    axis = next((a for a, size in enumerate(now) if size != was[a]), None)
    if axis is None:
        return None
    free = target.copy()
    if node.op_type == "Expand":
        expanded = axis + len(target) - len(was)
        free[expanded] = 1
        return free if target[expanded] != 1 else None
    place = _batch_place(was, axis, result, old)
    if place is None and _adapts(target, now, result, old):
        return None
    if place is None:
        raise UnsupportedModel(
            f"the batch {old} of shape {list(was)} cannot be found in the target {target.tolist()}",
            at=f"node {node.name!r} (Reshape)",
            fix=SYMBOLIC,
        )
    if target[place] == -1 or (target[place] == 0 and place == axis):
        return None
    _spell_out(free, result)
    free[place] = 0 if place == axis and result[place] == was[axis] else -1
    return free


def _let_zero_copy(node: onnx.NodeProto) -> None:
    """Clear allowzero, under which a 0 in the target is a size of zero; the exporter sets it always."""
    attributes = [attribute for attribute in node.attribute if attribute.name != "allowzero"]
    del node.attribute[:]
    node.attribute.extend(attributes)


def _adapts(target: np.ndarray, now: Shape, result: Shape, old: int) -> bool:
    """Tell whether the target's -1 stands for the batch: [T * B, H] to [T, -1, H], B being inside."""
    open_axes = np.flatnonzero(target == -1)
    if len(open_axes) != 1 or result[open_axes[0]] != old:
        return False
    rest = [size for place, size in enumerate(result) if place != open_axes[0]]
    return _count(now) % _count(tuple(rest)) == 0


def _spell_out(target: np.ndarray, result: Shape) -> None:
    """Write numbers for -1 and 0, which the batch may need for itself."""
    for place, size in enumerate(result):
        assert isinstance(size, int)
        target[place] = size


def _batch_place(was: Shape, axis: int, result: Shape, old: int) -> int | None:
    """Return the position in `result` of the batch that lies at `axis` of `was`.

    Both are mixed radices of the same count: the batch is where as many entries lie outside of it.
    """
    outside = _count(was[:axis])
    candidates = []
    for place, size in enumerate(result):
        assert isinstance(size, int)
        before = _count(result[:place])
        if before <= outside and outside * old <= before * size:
            candidates.append(place)
    exact = [place for place in candidates if result[place] == old and _count(result[:place]) == outside]
    if axis in exact:
        return axis
    return next(iter(exact or candidates), None)


def _is_static(shape: Shape) -> bool:
    return all(isinstance(size, int) for size in shape)


def _count(sizes: Shape) -> int:
    count = 1
    for size in sizes:
        assert isinstance(size, int)
        count *= size
    return count


def _check_batch_survives(model: onnx.ModelProto, before: Types, after: Types, old: int) -> None:
    """A graph whose shapes clash now, or whose outputs do not follow the batch, holds it elsewhere."""
    check_batch_is_free(model, f"the batch {old}")
    names = [output.name for output in model.graph.output]
    if all(before[name] == after[name] and before[name].shape for name in names):
        raise UnsupportedModel(
            f"no output follows the batch: {old} is held in a constant that partc does not recognise",
            at=f"outputs {names}",
            fix=SYMBOLIC,
        )


def check_batch_is_free(model: onnx.ModelProto, batch: str = "the model's own batch") -> None:
    """Raise UnsupportedModel where shapes clash: after rebatching, a constant then holds the old batch.

    Shape inference looks into some ops only once they are expanded: it ignores the initial state of an LSTM.
    A symbol clashes with no number: what is to take any batch is looked at with one.
    """
    try:
        check_shapes(_of_one_batch(model))
    except BadModel as error:
        raise UnsupportedModel(
            f"{batch} is held in a constant that partc does not recognise: "
            + error.what.replace(str(PROBE), BATCH).replace(str(DIVISIBLE), BATCH),
            at=error.at,
            fix=SYMBOLIC,
        ) from error


def _of_one_batch(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model of any batch at one that no constant holds; another model as it is."""
    light = without_large_values(model)
    sizes = [size for value in light.graph.input for size in value.type.tensor_type.shape.dim]
    if not any(size.dim_param == BATCH for size in sizes):
        return model
    for size in sizes:
        if size.dim_param == BATCH:
            size.dim_value = DIVISIBLE
    for output in light.graph.output:
        output.type.tensor_type.ClearField("shape")
    del light.graph.value_info[:]
    return light
