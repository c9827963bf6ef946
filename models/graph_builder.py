"""Write forward ONNX graphs readably.

A builder collects nodes; every method that computes returns tensor names, which the next call reads:

    hidden = b.op("MatMul", x, b.normal("W", (784, 512), scale=0.05))

Parameters are not stored: a node draws each of them (RandomNormal, RandomUniform) or fills it
(ConstantOfShape), so a file stays small however large its tables are. The metadata entry
`partc.forward` lists them, with the state that a step carries on and the axis of each input that
holds samples:

    {"parameters": ["W"], "state": {"running_mean": "running_mean_next"}, "sample_axes": {"x": 0}}
"""

import json
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import onnx
from onnx import TensorProto, helper

OPSET = 21
MODEL_IR_VERSION = 10
METADATA_KEY = "partc.forward"

DType = Literal["float32", "float64"]
Size = Annotated[int, msgspec.Meta(ge=1)]
ELEMENT_TYPE: dict[DType, int] = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every model lets its user choose."""

    batch: Annotated[Size | None, msgspec.Meta(description="samples per step; none leaves it open")] = None
    dtype: Annotated[DType, msgspec.Meta(description="element type of parameters")] = "float32"
    seed: Annotated[int, msgspec.Meta(description="seed of the first parameter's draws", ge=0)] = 1

    @property
    def batch_size(self) -> int | str:
        """Return the batch's size, or its symbol where it is left open."""
        return "batch" if self.batch is None else self.batch


class GraphBuilder:
    """Collects the nodes of one forward graph."""

    def __init__(self, name: str, options: ModelOptions) -> None:
        self.name = name
        self.element_type = ELEMENT_TYPE[options.dtype]
        self._next_seed = options.seed
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._constants: dict[str, str] = {}
        self._parameters: list[str] = []
        self._state: dict[str, str] = {}
        self._sample_axes: dict[str, int | None] = {}

    def input(
        self, name: str, element_type: int, shape: Sequence[int | str], *, sample_axis: int | None = 0
    ) -> str:
        """Declare a data input; `sample_axis` is None where all samples share it."""
        self._inputs.append(helper.make_tensor_value_info(name, element_type, list(shape)))
        self._sample_axes[name] = sample_axis
        return name

    def output(self, name: str, shape: Sequence[int | str]) -> None:
        """Declare tensor `name`, of the model's element type, as an output of the graph."""
        self._outputs.append(helper.make_tensor_value_info(name, self.element_type, list(shape)))

    def op(self, op_type: str, *inputs: str, name: str = "", **attributes: object) -> str:
        """Add a node with one output, called `name` or after its op, and return the output."""
        return self.ops(op_type, *inputs, outputs=(name or self._fresh(op_type),), **attributes)[0]

    def ops(
        self, op_type: str, *inputs: str, outputs: tuple[str, ...], **attributes: object
    ) -> tuple[str, ...]:
        """Add a node with these outputs, and return them. The node is named after the first."""
        node = helper.make_node(op_type, list(inputs), list(outputs), name=f"{op_type}:{outputs[0]}")
        # ONNX wants attributes in one order for equal bytes; keywords come in the caller's.
        node.attribute.extend(helper.make_attribute(key, attributes[key]) for key in sorted(attributes))
        self._nodes.append(node)
        return outputs

    def split(self, tensor: str, pieces: int, axis: int) -> tuple[str, ...]:
        """Cut a tensor into equal pieces along an axis."""
        stem = self._fresh("Split")
        outputs = tuple(f"{stem}.{i}" for i in range(pieces))
        return self.ops("Split", tensor, outputs=outputs, axis=axis, num_outputs=pieces)

    def integers(self, *values: int) -> str:
        """Return a constant int64[n] vector."""
        return self._constant(f"integers{list(values)}", value_ints=list(values))

    def number(self, value: int, element_type: int | None = None) -> str:
        """Return a scalar of the model's, or the given, element type.

        It is cast from an integer: a float that a node makes from nothing would be a parameter.
        """
        to = element_type or self.element_type
        name = f"{helper.tensor_dtype_to_np_dtype(to)}[{value}]"
        if name not in self._constants:
            integer = self._constant(f"integer[{value}]", value_int=value)
            self._constants[name] = self.op("Cast", integer, name=name, to=to)
        return self._constants[name]

    def normal(self, name: str, shape: Sequence[int], *, scale: float) -> str:
        """Make a parameter of independent normal draws around zero."""
        self._parameters.append(name)
        return self.op("RandomNormal", name=name, **self._draw(shape), mean=0.0, scale=scale)

    def uniform(self, name: str, shape: Sequence[int], *, limit: float) -> str:
        """Make a parameter of independent uniform draws on [-limit, limit)."""
        self._parameters.append(name)
        return self.op("RandomUniform", name=name, **self._draw(shape), low=-limit, high=limit)

    def filled(self, name: str, shape: Sequence[int], value: float) -> str:
        """Make a parameter of equal values."""
        self._parameters.append(name)
        return self._fill(name, shape, value)

    def state(self, name: str, shape: Sequence[int], value: float) -> tuple[str, str]:
        """Make a variable that the forward pass itself renews; return its name and its next value's."""
        following = f"{name}_next"
        self._state[name] = following
        self.output(following, shape)
        return self._fill(name, shape, value), following

    def zeros(self, shape: str) -> str:
        """Return zeros of a computed shape int64[rank]."""
        return self.op("ConstantOfShape", shape, value=self._one_element(0.0))

    def model(self) -> onnx.ModelProto:
        """Return the graph as a model."""
        graph = helper.make_graph(self._nodes, self.name, self._inputs, self._outputs)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
        model.ir_version = MODEL_IR_VERSION
        model.producer_name = "partc.models"
        facts = {
            "parameters": self._parameters,
            "state": self._state,
            "sample_axes": self._sample_axes,
        }
        helper.set_model_props(model, {METADATA_KEY: json.dumps(facts)})
        return model

    def _draw(self, shape: Sequence[int]) -> dict[str, object]:
        # The seed is a float attribute: whole numbers above 2**24 would lose digits.
        seed = float(self._next_seed)
        self._next_seed += 1
        return {"shape": list(shape), "seed": seed, "dtype": self.element_type}

    def _fill(self, name: str, shape: Sequence[int], value: float) -> str:
        return self.op("ConstantOfShape", self.integers(*shape), name=name, value=self._one_element(value))

    def _one_element(self, value: float) -> TensorProto:
        return helper.make_tensor("value", self.element_type, [1], [value])

    def _constant(self, name: str, **attributes: object) -> str:
        if name not in self._constants:
            self._constants[name] = self.op("Constant", name=name, **attributes)
        return self._constants[name]

    def _fresh(self, stem: str) -> str:
        return f"{stem}_{len(self._nodes)}"
