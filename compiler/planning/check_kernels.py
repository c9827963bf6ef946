"""Refuse, before anything is written, element types that ONNX Runtime cannot train in.

Its CPU provider has kernels for float32; for float64 and 16 bits it lacks some, for bfloat16 nearly all.
Which ones, it is asked itself: every kind of node in such a type is loaded alone, once.
"""

from collections.abc import Iterable

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
from onnx import helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, RuntimeException
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

from partc.cost.cluster.cluster import Cluster
from partc.passes.graph.training_graph import IR_VERSION, TrainingGraph
from partc.passes.indexed_rows.indexed_slices import SUM_ROWS
from partc.runtime.errors import UnsupportedModel

STANDARD = ("", "ai.onnx", None)
SCATTERS = frozenset({"ScatterND", "ScatterElements"})
BFLOAT16 = helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)
COMPLETE = np.dtype(np.float32)  # the float type that every op has a kernel for


def check_kernels(training: TrainingGraph, cluster: Cluster) -> None:
    """Raise UnsupportedModel for what is stored in bfloat16, and for an op without a kernel on a CPU.

    Of GPUs nothing is asked: the machine that compiles may have none. What their servers run is opened
    when it is written (load_segments.py).
    """
    if any(device.kind == "cpu" for host in cluster.hosts for device in host.devices):
        check_cpu_kernels(training)
    else:
        _check_stored(training)


def check_cpu_kernels(training: TrainingGraph) -> None:
    """Raise UnsupportedModel for what no cluster with a CPU can train."""
    _check_stored(training)
    _check_sparse_gradients(training)
    _check_nodes(training.graph.nodes, training.opset)


def _check_stored(training: TrainingGraph) -> None:
    parameters = [name for name in training.variables if name in training.gradients]
    tensors = [
        ("variable", name, training.variables[name].dtype) for name in (*parameters, *training.variables)
    ]
    tensors += [("data input", name, np.dtype(d.dtype)) for name, d in training.data_inputs.items()]
    for what, name, dtype in tensors:
        if dtype == BFLOAT16:
            raise UnsupportedModel(
                f"{what} {name!r} is in bfloat16: MPI does not sum it, and ONNX Runtime computes with it "
                "on few devices",
                at=f"input {name!r}",
                fix="export the model in float32, or in float16 and give partc grad --loss-scale",
            )


def _check_sparse_gradients(training: TrainingGraph) -> None:
    for name, gradient in training.gradients.items():
        dtype = training.variables[name].dtype
        if gradient.is_sparse and _is_short(dtype):
            raise UnsupportedModel(
                f"ONNX Runtime {ort.__version__} adds no rows in {dtype} on a CPU",
                at=f"table {name!r}, whose gradient is sparse",
                fix="export the model in float32, or give partc grad --loss-scale: masters in float32",
            )


def _check_nodes(nodes: Iterable[gs.Node], opset: int) -> None:
    kinds: set[tuple[object, ...]] = set()
    for node in nodes:
        types = tuple(_dtype(tensor) for tensor in (*node.inputs, *node.outputs))
        rare = next((dtype for dtype in types if dtype is not None and _is_rare(dtype)), None)
        kind = (node.op, node.domain, len(node.inputs), types, node.attrs.get("reduction"))
        if rare is None or kind in kinds:
            continue
        kinds.add(kind)
        adds = node.op in SCATTERS and node.attrs.get("reduction", "none") != "none"
        short_sum = (adds or node.op == SUM_ROWS) and _is_short(rare)
        if short_sum or (node.domain in STANDARD and not _has_kernel(node, opset)):
            raise _refusal(node.op, rare, f"node {node.name!r}")


def _refusal(op: str, dtype: np.dtype, place: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"ONNX Runtime {ort.__version__} has no kernel for {op} in {dtype} on a CPU",
        at=place,
        fix="export the model in float32" + (", or in float16" if dtype == BFLOAT16 else ""),
    )


def _has_kernel(node: gs.Node, opset: int) -> bool:
    """Tell whether ONNX Runtime loads a node alone."""
    inputs = [tensor for tensor in node.inputs if isinstance(tensor, gs.Variable) and tensor.name]
    outputs = [tensor for tensor in node.outputs if tensor.name]
    distinct = list({tensor.name: tensor for tensor in inputs}.values())
    model: onnx.ModelProto = gs.export_onnx(gs.Graph([node], distinct, outputs, opset=opset))
    model.ir_version = IR_VERSION
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # nothing is run: threads would only be started and ended
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except NoKernel:
        return False
    except (Fail, InvalidArgument, InvalidGraph, RuntimeException):
        return True  # it has a kernel, but wants more than a node without its surroundings
    return True


def _dtype(tensor: gs.Tensor) -> np.dtype | None:
    """Return an element type; ONNX's own number stands where numpy has none."""
    dtype = tensor.dtype
    return helper.tensor_dtype_to_np_dtype(dtype) if isinstance(dtype, int) else dtype and np.dtype(dtype)


def _is_short(dtype: np.dtype) -> bool:
    return dtype.itemsize < COMPLETE.itemsize and _is_rare(dtype)


def _is_rare(dtype: np.dtype) -> bool:
    """Tell whether a type is a float other than float32; numpy itself knows not all of them."""
    return dtype != COMPLETE and dtype.kind not in "biuSOU"
