"""One training step on one device, and what is known about it.

Nodes are graphsurgeon's. Initial values and functions stay as ONNX has them: no pass looks into them but to
count and to classify, and the files take them as they are.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx.external_data_helper import ExternalDataInfo

from partc.runtime.plan.variables import Constant, DataInput, DrawnInput, Normal, ShardInput, Uniform

IR_VERSION = 10  # of graphs that partc writes: every onnxruntime that it supports reads it


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """An initial value that lies in the model file or in its external data; read when asked for."""

    proto: onnx.TensorProto
    folder: Path

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape without reading the values."""
        return tuple(self.proto.dims)

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype without reading the values."""
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.proto.data_type))

    def load(self) -> np.ndarray:
        """Return the values, shaped and typed as the initializer says; external ones as a file map."""
        if self.proto.data_location != onnx.TensorProto.EXTERNAL:
            return onnx.numpy_helper.to_array(self.proto)
        place = ExternalDataInfo(self.proto)
        path = self.folder / place.location
        return np.memmap(path, self.dtype, "r", offset=place.offset or 0, shape=self.shape)


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """An initial value that an ONNX graph without inputs computes."""

    model: onnx.ModelProto
    output: str


InitialValue = Constant | Normal | Uniform | StoredTensor | MadeTensor


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor that lives from step to step."""

    name: str  # the graph input that reads it
    next: str  # the graph output that holds its next value
    dtype: np.dtype
    shape: tuple[int, ...]
    initial: InitialValue


@dataclass(frozen=True, slots=True)
class Gradient:
    """What the update of `parameter` consumes.

    Dense: tensor `dense`, shaped like the parameter. Indexed slices: tensors `ids` int64[n] and
    `rows` float[n, ...], meaning the sum of the rows scattered to the ids along axis 0; `dense` is
    then the tensor that holds that sum where the graph makes one, else None.
    """

    parameter: str
    dense: str | None = None
    ids: str | None = None
    rows: str | None = None

    @property
    def is_sparse(self) -> bool:
        """Tell whether the gradient is indexed slices."""
        return self.ids is not None


@dataclass
class TrainingGraph:
    """The graph and its bindings. Only passes change `graph`; it stays sorted.

    `graph.inputs` are the data, shard and drawn inputs and the variables, `graph.outputs` the outputs
    and the variables' next values. Every node has a unique name.
    """

    graph: gs.Graph
    variables: dict[str, Variable]
    data_inputs: dict[str, DataInput]
    outputs: tuple[str, ...]
    loss: str | None
    gradients: dict[str, Gradient]
    forward_outputs: tuple[str, ...] = ()  # what a deployed forward model returns
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    opset: int = 21
    source: bytes = b""  # the model file's own bytes where small, for the plan's folder
    shard_inputs: dict[str, ShardInput] = field(default_factory=dict)
    drawn_inputs: dict[str, DrawnInput] = field(default_factory=dict)
    output_names: dict[str, str] = field(default_factory=dict)  # output -> what the user calls it
    unread_inputs: tuple[str, ...] = ()  # of the user's graph, that nothing reads which leads to an output
    unfound_gradients: dict[str, str] = field(default_factory=dict)  # parameter -> why it was not found
    are_gradients_found: bool = False  # by looking for them: the file does not record them
    fixed_sizes: dict[str, int] = field(default_factory=dict)  # symbolic ones that were given numbers

    @property
    def results(self) -> set[str]:
        """The tensors that a step ends with: outputs, and the variables' next values."""
        return {*self.outputs, *(variable.next for variable in self.variables.values())}

    @property
    def named_tensors(self) -> set[str]:
        """The tensors that keep their names whatever passes write: results of the graph, and gradients."""
        gradients = self.gradients.values()
        own = {
            name for gradient in gradients for name in (gradient.dense, gradient.ids, gradient.rows) if name
        }
        return own | {tensor.name for tensor in self.graph.outputs}

    def varying_inputs(self) -> list[str]:
        """Return the inputs that differ from replica to replica: samples, their draws, its shard."""
        fed = self.data_inputs | self.drawn_inputs
        sampled = [name for name, entry in fed.items() if entry.sample_axis is not None]
        shards = [name for name, shard_input in self.shard_inputs.items() if shard_input.holds == "shard_id"]
        return sampled + shards
