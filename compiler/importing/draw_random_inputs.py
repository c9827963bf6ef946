"""Replace ops that draw random numbers by inputs that the runtime draws.

before   y = Dropout (x, 0.1, true)          after   kept = GreaterOrEqual (y.drawn, 0.1)
                                                     y = Where (kept, x / 0.9, 0)
         z = RandomNormalLike (x)                    z: an input

ONNX Runtime's generators go on from run to run and draw alike in all replicas that share a segment.
An input is split over the samples as data is, so that every rank draws the rows of its own samples
(runtime/data/step_draws.py). verify's reference reads the user's graph through the same function: it is
the one thing changed in it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx
from onnx import TensorProto, helper

from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.tensor_types import Shape, TensorType, small_constants, value_info
from partc.compiler.importing.symbolic_types import symbolic_types
from partc.passes.graph.bodies import subgraphs_of
from partc.passes.graph.inline_functions import inline_local_functions
from partc.runtime.errors import UnsupportedModel
from partc.runtime.plan.variables import DrawnInput, Normal, Uniform


def draw_random_inputs(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[DrawnInput, ...]]:
    """Return the model with its draws as inputs, and these; the model itself if it draws nothing.

    Raises UnsupportedModel for a draw inside the body of an If, Loop or Scan, or of unknown shape.
    """
    if any(_draws(node, {}) for function in model.functions for node in function.node):
        model = inline_local_functions(model)
    constants = small_constants(model.graph)
    for node in model.graph.node:
        _check_bodies(node)
    if not any(_draws(node, constants) for node in model.graph.node):
        return model, ()
    return _Replacing.of(model, constants).replace_in(model)


def _draws(node: onnx.NodeProto, constants: Mapping[str, np.ndarray]) -> bool:
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type == "Dropout":
        is_told = len(node.input) > 2 and bool(node.input[2])
        return is_told and bool(constants.get(node.input[2], True))
    return node.op_type in REPLACEMENTS


def _check_bodies(node: onnx.NodeProto) -> None:
    for body in subgraphs_of(node):
        for inner in body.node:
            if _draws(inner, small_constants(body)):
                raise UnsupportedModel(
                    f"random numbers drawn in the body of a {node.op_type}",
                    at=f"node {inner.name or inner.output[0]!r} ({inner.op_type})",
                    fix="draw outside of it, or feed the numbers as a data input",
                )
            _check_bodies(inner)


@dataclass
class _Replacing:
    """The graph as it is written anew: nodes, and the inputs drawn so far."""

    build: NodeBuilder
    types: Mapping[str, TensorType]
    constants: Mapping[str, np.ndarray]
    drawn: list[DrawnInput]

    @classmethod
    def of(cls, model: onnx.ModelProto, constants: Mapping[str, np.ndarray]) -> "_Replacing":
        graph = model.graph
        names = [name for node in graph.node for name in (node.name, *node.input, *node.output)]
        build = NodeBuilder([*names, *(info.name for info in graph.input)])
        return cls(build, symbolic_types(model), constants, [])

    def replace_in(self, model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[DrawnInput, ...]]:
        for node in model.graph.node:
            if _draws(node, self.constants):
                REPLACEMENTS[node.op_type](self, node)
            else:
                self.build.copy(node)
        result = onnx.ModelProto()
        result.CopyFrom(model)
        del result.graph.node[:]
        result.graph.node.extend(self.build.nodes)
        result.graph.initializer.extend(self.build.constants)
        result.graph.input.extend(_info(drawn) for drawn in self.drawn)
        return result, tuple(self.drawn)

    def draw(self, node: onnx.NodeProto, shape: Shape, element: int, how: "SeededOp") -> str:
        """Add an input for a node's draw, and return its name."""
        name = self.build.fresh(f"{node.output[0]}.drawn")
        seed = _number(node, "seed")
        place = len(self.drawn) + 1
        own = place if seed is None else _whole(seed)
        sizes = _static_sizes(shape, node)
        like = node.input[0] if node.input else None
        dtype = _dtype(element).name
        self.drawn.append(DrawnInput(name, dtype, sizes, how(own), seed is None, like))
        return name

    def rename(self, name: str, node: onnx.NodeProto) -> None:
        """Let a tensor take the place of a node's first output."""
        self.build.call("Identity", [name], [node.output[0]])

    def type_of(self, tensor: str, node: onnx.NodeProto) -> tuple[Shape, int]:
        """Return a tensor's shape and element type. Raises UnsupportedModel if its rank is unknown."""
        type_ = self.types.get(tensor)
        if type_ is None or type_.shape is None:
            raise _unknown_shape(node)
        return type_.shape, type_.element


def _info(drawn_input: DrawnInput) -> onnx.ValueInfoProto:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(drawn_input.dtype))
    return value_info(drawn_input.name, TensorType(element, drawn_input.shape))


def _dtype(element: int) -> np.dtype:
    return np.dtype(helper.tensor_dtype_to_np_dtype(element))


def _static_sizes(shape: Shape, node: onnx.NodeProto) -> tuple[int | str, ...]:
    sizes = tuple(size for size in shape if size is not None)
    if len(sizes) < len(shape):
        raise _unknown_shape(node)
    return sizes


def _unknown_shape(node: onnx.NodeProto) -> UnsupportedModel:
    return UnsupportedModel(
        "random numbers are drawn in a shape that does not follow from the inputs' sizes",
        at=f"node {node.name or node.output[0]!r} ({node.op_type})",
        fix="export the model with fixed sizes, or feed the numbers as a data input",
    )


def _number(node: onnx.NodeProto, name: str) -> float | None:
    """Return an attribute that is a number."""
    for attribute in node.attribute:
        if attribute.name == name:
            return float(attribute.f if attribute.type == onnx.AttributeProto.FLOAT else attribute.i)
    return None


def _element(node: onnx.NodeProto, default: int) -> int:
    """Return the attribute `dtype`."""
    return int(_number(node, "dtype") or default)


def _whole(seed: float) -> int:
    """Return a seed as a whole number: RandomNormal's is a float."""
    return int(seed) if seed.is_integer() else int(np.float64(seed).view(np.int64))


# ---------------------------------------------------------------- op by op

UNIT = partial(Uniform, 0.0, 1.0)


def _normal(at: _Replacing, node: onnx.NodeProto) -> None:
    mean, scale = _number(node, "mean"), _number(node, "scale")
    _draw_itself(at, node, partial(Normal, mean or 0.0, 1.0 if scale is None else scale))


def _uniform(at: _Replacing, node: onnx.NodeProto) -> None:
    low, high = _number(node, "low"), _number(node, "high")
    _draw_itself(at, node, partial(Uniform, low or 0.0, 1.0 if high is None else high))


def _draw_itself(at: _Replacing, node: onnx.NodeProto, how: "SeededOp") -> None:
    """RandomNormal, RandomUniform and their Like forms: the draw takes the output's place."""
    if node.input:
        shape, element = at.type_of(node.input[0], node)
    else:
        shape, element = next(tuple(a.ints) for a in node.attribute if a.name == "shape"), TensorProto.FLOAT
    at.rename(at.draw(node, shape, _element(node, element), how), node)


def _bernoulli(at: _Replacing, node: onnx.NodeProto) -> None:
    """1 where a uniform draw is below the probability."""
    shape, element = at.type_of(node.input[0], node)
    uniform = at.draw(node, shape, TensorProto.FLOAT, UNIT)
    chance = at.build.op("Cast", node.input[0], to=TensorProto.FLOAT)
    below = at.build.op("Less", uniform, chance)
    at.build.call("Cast", [below], [node.output[0]], to=_element(node, element))


def _multinomial(at: _Replacing, node: onnx.NodeProto) -> None:
    """The number of classes whose cumulated probability a uniform draw has passed.  float[rows, classes]"""
    build, ((rows, classes), _) = at.build, at.type_of(node.input[0], node)
    if not isinstance(classes, int):
        raise _unknown_shape(node)
    samples = int(_number(node, "sample_size") or 1)
    samples_drawn = at.draw(node, (rows, samples, 1), TensorProto.FLOAT, UNIT)
    chances = build.op("Softmax", build.op("Cast", node.input[0], to=TensorProto.FLOAT), axis=1)
    cumulated = build.op("CumSum", chances, build.constant(np.array(1, np.int64)))
    # The last is 1 but for rounding: it is never passed.
    inner = build.op("Slice", cumulated, build.ints(0), build.ints(classes - 1), build.ints(1))
    is_past = build.op("GreaterOrEqual", samples_drawn, build.op("Unsqueeze", inner, build.ints(1)))
    indices = build.op(
        "ReduceSum", build.op("Cast", is_past, to=TensorProto.INT64), build.ints(2), keepdims=0
    )
    build.call("Cast", [indices], [node.output[0]], to=_element(node, TensorProto.INT32))


def _dropout(at: _Replacing, node: onnx.NodeProto) -> None:
    """y = x / (1 - ratio) where a uniform draw is not below the ratio, else 0; x if not training."""
    x, training = node.input[0], node.input[2]
    shape, element = at.type_of(x, node)
    uniform = at.draw(node, shape, TensorProto.FLOAT, UNIT)
    ratio, scale = _ratio_and_scale(at, node, element)
    build, is_told = at.build, training not in at.constants
    mask = node.output[1] if len(node.output) > 1 and node.output[1] else build.fresh(f"{uniform}.mask")
    zero = build.constant(np.zeros((), _dtype(element)))
    if not is_told:
        build.call("GreaterOrEqual", [uniform, ratio], [mask])
        build.call("Where", [mask, build.op("Mul", x, scale), zero], [node.output[0]])
        return
    is_kept = build.op("GreaterOrEqual", uniform, ratio)
    build.call("Or", [is_kept, build.op("Not", training)], [mask])
    dropped = build.op("Where", is_kept, build.op("Mul", x, scale), zero)
    build.call("Where", [training, dropped, x], [node.output[0]])


def _ratio_and_scale(at: _Replacing, node: onnx.NodeProto, element: int) -> tuple[str, str]:
    """Return the ratio as float and 1 / (1 - ratio), which is 0 where all is dropped, as `x` is."""
    name, build = node.input[1], at.build
    if name and name not in at.constants:
        keep_ratio = build.op("Sub", build.constant(np.ones((), _dtype(at.type_of(name, node)[1]))), name)
        scale = build.op("Cast", build.op("Reciprocal", keep_ratio), to=element)
        return build.op("Cast", name, to=TensorProto.FLOAT), scale
    ratio = float(at.constants[name].item()) if name else 0.5
    scale_value = 1 / (1 - ratio) if ratio < 1 else 0.0
    ratio_name = build.constant(np.array(ratio, np.float32))
    return ratio_name, build.constant(np.array(scale_value, _dtype(element)))


SeededOp = Callable[[int], Normal | Uniform]  # from a seed
Replacement = Callable[[_Replacing, onnx.NodeProto], None]

REPLACEMENTS: Mapping[str, Replacement] = {
    "RandomNormal": _normal,
    "RandomNormalLike": _normal,
    "RandomUniform": _uniform,
    "RandomUniformLike": _uniform,
    "Bernoulli": _bernoulli,
    "Multinomial": _multinomial,
    "Dropout": _dropout,
}
