"""Training steps of the light models that the onnx package has, an eighth as wide, in float64.

Nobody here made them: opset 9, a batch of one, inference graphs, parameters that ConstantOfShape makes.
"""

from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Momentum

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
LIGHT_MODELS = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet",
    "vgg19", "zfnet512",
)  # fmt: skip
NARROWER = 8
AS_WIDE = ("shufflenet",)  # its channels are in groups of three


@lru_cache(maxsize=2)
def light_step(name: str, samples: int) -> onnx.ModelProto:
    """Return a training step: means of the cross entropy, momentum, drawn parameters."""
    return build_training_graph(
        narrow_light_model(name),
        loss="softmax_cross_entropy",
        optimizer=Momentum(0.01),
        batch_size=samples,
        reinit=1,
    )


def narrow_light_model(name: str) -> onnx.ModelProto:
    """Return the forward graph: channels and classes an eighth as many, but for those of the image."""
    model = onnx.load(LIGHT / f"light_{name}.onnx")
    graph = model.graph
    narrower = 1 if name in AS_WIDE else NARROWER
    spelled = {n.input[0] for n in graph.node if n.op_type == "ConstantOfShape"}
    spelled |= {n.input[1] for n in graph.node if n.op_type == "Reshape"}
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in graph.initializer:
        value = numpy_helper.to_array(tensor)
        if tensor.name in spelled:
            value = _narrow_shape(value, narrower)
        elif tensor.data_type == TensorProto.FLOAT:
            value = value[: len(value) // narrower] if value.ndim == 1 else value
            value = value.astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
        shapes[tensor.name] = value.shape
    for attribute in (a for node in graph.node for a in node.attribute if a.t.data_type == TensorProto.FLOAT):
        attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype(np.float64)))
    for info in (*graph.input, *graph.output):
        kind = info.type.tensor_type
        kind.elem_type = TensorProto.DOUBLE if kind.elem_type == TensorProto.FLOAT else kind.elem_type
        if info.name in shapes:
            info.CopyFrom(helper.make_tensor_value_info(info.name, kind.elem_type, shapes[info.name]))
    for info in graph.output:
        info.type.tensor_type.ClearField("shape")
    return model


def _narrow_shape(shape: np.ndarray, narrower: int) -> np.ndarray:
    """Divide channels: the first two axes of a kernel, both of a matrix, the last two behind axes of one."""
    is_behind = list(shape[:2]) == [1, 1]
    sizes = [
        size // narrower if size > 3 and size % narrower == 0 and (axis < 2 or is_behind) else size
        for axis, size in enumerate(shape)
    ]
    return np.array(sizes, shape.dtype)
