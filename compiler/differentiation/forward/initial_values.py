"""Initial values of variables, kept as small as the forward graph keeps them, and as ONNX nodes."""

from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto, helper, numpy_helper

from partc.compiler.differentiation.tensor_types import TensorType, Types, static_shape
from partc.runtime.plan.variables import Constant, Normal, Uniform

INT64 = TensorProto.INT64
InitialValue = Constant | Normal | Uniform | TensorProto


def initial_values(graph: onnx.GraphProto, types: Types, names: Sequence[str]) -> dict[str, InitialValue]:
    """Return the initial value that the forward graph gives each variable.

    A random node without a whole seed gets one: its position in `names`, counted from 1.
    """
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    makers = {node.output[0]: node for node in graph.node}
    return {
        name: initializers[name] if name in initializers else _read_maker(makers[name], seed)
        for seed, name in enumerate(names, start=1)
    }


def _read_maker(maker: onnx.NodeProto, default_seed: int) -> InitialValue:
    attributes: Mapping[str, float | TensorProto] = {
        attribute.name: helper.get_attribute_value(attribute) for attribute in maker.attribute
    }

    def number(name: str, default: float) -> float:
        value = attributes.get(name, default)
        assert isinstance(value, int | float)
        return float(value)

    seed = number("seed", 0.5)
    whole_seed = int(seed) if seed.is_integer() else default_seed
    if maker.op_type == "ConstantOfShape":
        fill = attributes.get("value")
        return Constant(float(numpy_helper.to_array(fill).item()) if isinstance(fill, TensorProto) else 0.0)
    if maker.op_type.startswith("RandomNormal"):
        return Normal(number("mean", 0.0), number("scale", 1.0), whole_seed)
    return Uniform(number("low", 0.0), number("high", 1.0), whole_seed)


def initialization(values: Mapping[str, InitialValue], types: Types) -> onnx.TrainingInfoProto:
    """Return the training_info that makes the values that are not stored."""
    training = onnx.TrainingInfoProto()
    graph = training.initialization
    graph.name = "initialization"
    for name, value in values.items():
        if isinstance(value, TensorProto):
            continue
        type_ = TensorType(types[name].element, static_shape(types, name, needed_by=f"variable {name!r}"))
        output = f"{name}.initial"
        graph.node.extend(_nodes(value, type_, output))
        graph.output.append(helper.make_tensor_value_info(output, type_.element, type_.shape))
        training.initialization_binding.add(key=name, value=output)
    return training


def _nodes(value: Constant | Normal | Uniform, type_: TensorType, output: str) -> list[onnx.NodeProto]:
    shape = list(type_.shape or ())
    match value:
        case Constant(fill):
            # A list attribute cannot be empty: the shape of a scalar is a tensor of no elements.
            shape_attribute = (
                {"value_ints": shape} if shape else {"value": helper.make_tensor("s", INT64, [0], [])}
            )
            sizes = helper.make_node(
                "Constant", [], [f"{output}.shape"], f"{output}.shape", **shape_attribute
            )
            tensor = helper.make_tensor("value", type_.element, [1], [fill])
            constant = helper.make_node(
                "ConstantOfShape", [f"{output}.shape"], [output], output, value=tensor
            )
            return [sizes, constant]
        case Normal(mean, scale, seed):
            draw = {"mean": mean, "scale": scale}
        case Uniform(low, high, seed):
            draw = {"low": low, "high": high}
    op_type = type(value).__name__
    node = helper.make_node(f"Random{op_type}", [], [output], output)
    draw["seed"] = float(seed)
    node.attribute.extend(helper.make_attribute(key, value) for key, value in sorted(draw.items()))
    node.attribute.append(helper.make_attribute("dtype", type_.element))
    node.attribute.append(helper.make_attribute("shape", shape))
    return [node]
