"""Compare convolutions in the bodies that partc chooses with ONNX Runtime's own, on the same tensors.

    y = Conv (x, W)        y/body = Conv (x, W), whose body is chosen        max |y/body - y| and max |y|

Each is compared where it stands, and goes on with ONNX Runtime's result: what a ReLU makes of a rounding
in a layer before is no part of the difference.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from partc.passes.cpu_kernels.winograd import choose_bodies
from partc.passes.graph.infer_shapes import infer_shapes

SUFFIX = "/body"
Tensors = Mapping[str, np.ndarray[Any, np.dtype[Any]]]


def with_chosen_bodies(model: onnx.ModelProto, replicas: int) -> onnx.ModelProto:
    """Return a model as ranks on CPUs compute it, which share its batch."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    choose_bodies(result, infer_shapes(model, data_prop=True), replicas=replicas)
    return result


def probe_of(model: onnx.ModelProto, replicas: int) -> tuple[onnx.ModelProto, list[str]]:
    """Return a model that computes convolutions both ways, and the results that are compared.

    For a result y it has the outputs y/body/difference and y/body/largest, both float32[].
    """
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    changed = choose_bodies(plain, infer_shapes(model, data_prop=True), replicas=replicas)
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.node[:], probe.graph.output[:]
    for node in model.graph.node:
        probe.graph.node.append(node)
        if node.output[0] in changed:
            probe.graph.node.extend(_twice(node))
    for result in changed:
        for measure in ("difference", "largest"):
            name = f"{result}{SUFFIX}/{measure}"
            probe.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, []))
    twins = {f"{result}{SUFFIX}" for result in changed}
    choose_bodies(probe, infer_shapes(probe, data_prop=True), twins, replicas)
    return probe, changed


def _twice(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Return a twin of a node, whose body is chosen, and what tells the two results apart."""
    twin = onnx.NodeProto()
    twin.CopyFrom(node)
    result, name = node.output[0], f"{node.output[0]}{SUFFIX}"
    twin.name = twin.output[0] = name
    yield twin
    yield helper.make_node("Sub", [name, result], [f"{name}/apart"], name=f"{name}/apart")
    for measure, tensor in (("difference", f"{name}/apart"), ("largest", result)):
        size = f"{name}/{measure}/size"
        yield helper.make_node("Abs", [tensor], [size], name=size)
        yield helper.make_node(
            "ReduceMax", [size], [f"{name}/{measure}"], name=f"{name}/{measure}", keepdims=0
        )


def differences(results: list[str], measured: Tensors) -> dict[str, float]:
    """Return for each result the largest difference, as a part of the largest element."""
    relative_differences = {}
    for result in results:
        difference = float(measured[f"{result}{SUFFIX}/difference"])
        largest = float(measured[f"{result}{SUFFIX}/largest"])
        relative_differences[result] = difference / largest if largest else difference
    return relative_differences
