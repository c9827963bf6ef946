"""Write sequences and optionals as the tensors that they hold, where these are known.

    s = SplitToSequence (x)      x0, x1, x2 = Split (x)
    y = SequenceAt (s, 1)        y = Identity (x1)
    z = ConcatFromSequence (s)   z = Concat (x0, x1, x2)

A sequence that comes from elsewhere, or whose length is computed, stays as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper

from partc.compiler.differentiation.forward.expand_ops import names_in, reads_of
from partc.compiler.differentiation.sizes.fold_sizes import fold_sizes
from partc.compiler.differentiation.tensor_types import Types, infer_types, small_constants
from partc.passes.graph.operation_builder import FunctionBuilder
from partc.runtime.errors import BadModel, UnsupportedModel

MAX_PIECES = 4096  # of one split, written out

# Ops that are written out.
UNPACKED = frozenset(
    {
        "ConcatFromSequence",
        "Optional",
        "OptionalGetElement",
        "SequenceAt",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceErase",
        "SequenceInsert",
        "SequenceLength",
        "SplitToSequence",
    }
)


def unpack_sequences(model: onnx.ModelProto) -> None:
    """Replace the ops in place; positions may be computed of constants.

    Raises BadModel, and UnsupportedModel where a sequence that is written out is read, or returned, whole.
    """
    graph = model.graph
    if not any(node.op_type in UNPACKED for node in graph.node):
        return
    fold_sizes(model, shapes=False)
    unpacking = _Unpacking(FunctionBuilder(names_in(graph)), infer_types(model), small_constants(graph))
    for node in graph.node:
        if not unpacking.take(node):
            if unpacking.is_known(reads_of(node)):
                raise _unwritten_sequence(node)
            unpacking.build.copy(node)
    for value in graph.output:
        if unpacking.is_known({value.name}):
            raise _returned_sequence(value.name)
    del graph.node[:]
    graph.node.extend(unpacking.build.nodes)


def check_no_sequences(graph: onnx.GraphProto) -> None:
    """Raise UnsupportedModel where a sequence is left that could not be written as tensors."""
    for node in graph.node:
        if node.op_type in UNPACKED and node.domain in ("", "ai.onnx"):
            raise _unwritten_sequence(node)
    for output in graph.output:
        if output.type.WhichOneof("value") in ("sequence_type", "optional_type"):
            raise _returned_sequence(output.name)


# ---------------------------------------------------------------- the graph


def _unwritten_sequence(node: onnx.NodeProto) -> UnsupportedModel:
    """Return the error of a node that makes or reads a sequence which cannot be written as tensors."""
    return UnsupportedModel(
        "sequences and optionals are compiled where their lengths and positions are constants, some tensors "
        f"are in them and no body reads them from outside: those of {node.op_type} are not",
        at=f"node {node.name or node.output[0]!r} ({node.op_type})",
        fix="write it with Split, Gather and Concat, or export it with fixed sizes",
    )


def _returned_sequence(name: str) -> UnsupportedModel:
    """Return the error of an output that is no tensor."""
    return UnsupportedModel(
        "the graph returns a sequence or optional, and a plan's outputs are tensors",
        at=f"output {name!r}",
        fix="return its pieces, or ConcatFromSequence of them",
    )


@dataclass
class _Unpacking:
    build: FunctionBuilder
    types: Types
    constants: Mapping[str, np.ndarray]
    tensors_of_sequence: dict[str, list[str]] = field(default_factory=dict)  # sequence -> its tensors
    tensor_of_optional: dict[str, str] = field(default_factory=dict)  # optional -> its tensor

    def is_known(self, names: set[str]) -> bool:
        """Tell whether one of the names is a sequence's or optional's that is written out."""
        return not names.isdisjoint(self.tensors_of_sequence.keys() | self.tensor_of_optional.keys())

    def take(self, node: onnx.NodeProto) -> bool:
        """Write a node out, or tell that it stays."""
        if node.op_type not in UNPACKED | {"Identity"} or node.domain not in ("", "ai.onnx"):
            return False
        first, output = (node.input[0] if node.input else ""), node.output[0]
        match node.op_type:
            case "SequenceConstruct" | "SequenceEmpty":
                self.tensors_of_sequence[output] = list(node.input)
            case "SplitToSequence":
                return self._split(node)
            case "Optional" | "OptionalGetElement" | "Identity" if first in self.tensors_of_sequence:
                self.tensors_of_sequence[output] = self.tensors_of_sequence[first]
            case "Optional" if first:
                self.tensor_of_optional[output] = first
            case "OptionalGetElement" if first in self.tensor_of_optional:
                self._emit("Identity", [self.tensor_of_optional[first]], output)
            case _ if first not in self.tensors_of_sequence:
                return False
            case "SequenceLength":
                self._emit("Constant", [], output, value_int=len(self.tensors_of_sequence[first]))
            case "ConcatFromSequence" if self.tensors_of_sequence[first]:
                self._concat(node)
            case "ConcatFromSequence":
                return False
            case _:
                return self._at_position(node)
        return True

    def _at_position(self, node: onnx.NodeProto) -> bool:
        """SequenceAt, SequenceErase and SequenceInsert, whose position may be left out: the end."""
        tensors, output = list(self.tensors_of_sequence[node.input[0]]), node.output[0]
        operands = [*node.input[1:], ""]
        tensor = operands.pop(0) if node.op_type == "SequenceInsert" else ""
        name = operands[0]
        if name and (name not in self.constants or self.constants[name].size != 1):
            return False
        place = int(self.constants[name].item()) if name else (len(tensors) if tensor else -1)
        if not -len(tensors) <= place < len(tensors) + bool(tensor):
            raise BadModel(
                f"position {place} of a sequence of {len(tensors)}",
                at=f"node {node.name or output!r} ({node.op_type})",
                fix="correct the position, or export the model again",
            )
        match node.op_type:
            case "SequenceAt":
                self._emit("Identity", [tensors[place]], output)
            case "SequenceErase":
                del tensors[place]
                self.tensors_of_sequence[output] = tensors
            case _:
                tensors.insert(place, tensor)
                self.tensors_of_sequence[output] = tensors
        return True

    def _split(self, node: onnx.NodeProto) -> bool:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        axis, lengths = int(attributes.get("axis", 0)), self._lengths(node, int(attributes.get("axis", 0)))
        if lengths is None:
            return False
        sizes = self.build.ints(*lengths)
        parts = list(self.build.call("Split", (node.input[0], sizes), len(lengths), axis=axis))
        is_apart = len(node.input) < 2 and not attributes.get("keepdims", 1)
        if is_apart:
            parts = [self.build.op("Squeeze", part, self.build.ints(axis)) for part in parts]
        self.tensors_of_sequence[node.output[0]] = parts
        return True

    def _lengths(self, node: onnx.NodeProto, axis: int) -> Sequence[int] | None:
        type_ = self.types.get(node.input[0])
        shape = () if type_ is None or type_.shape is None else type_.shape
        size = shape[axis] if -len(shape) <= axis < len(shape) else None
        if not isinstance(size, int) or size > MAX_PIECES:
            return None
        if len(node.input) < 2 or not node.input[1]:
            return [1] * size
        lengths = self.constants.get(node.input[1])
        if lengths is None:
            return None
        if lengths.ndim:
            return [int(length) for length in lengths]
        step = int(lengths)
        if step < 1:
            return None
        return [min(step, size - start) for start in range(0, size, step)]

    def _concat(self, node: onnx.NodeProto) -> None:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        axis, tensors = int(attributes["axis"]), self.tensors_of_sequence[node.input[0]]
        if attributes.get("new_axis", 0):
            tensors = [self.build.op("Unsqueeze", tensor, self.build.ints(axis)) for tensor in tensors]
        self._emit("Concat", tensors, node.output[0], axis=axis)

    def _emit(self, op_type: str, inputs: Sequence[str], output: str, **attributes: int) -> None:
        node = helper.make_node(op_type, inputs, [output], output)
        node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        self.build.nodes.append(node)
