"""ONNX's own shape inference, in no more memory than a model of its size needs.

It propagates values that may be sizes, and measures none of them before: of `Range (0, 2**40, 1)` it would
make 2**40, and where memory is refused some of its C++ crashes. So a model from outside is first tried in a
child. Any vector may be sizes to it, entry by entry: nodes that read one too long for that are kept from it.

Graphs that read nothing are run: what a compiler may know of a step before it runs.
"""

import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

from partc.runtime.errors import BadModel, UnsupportedModel

ROOM_BYTES = 1 << 28  # for what inference makes, beside copies of the model itself,
NODE_BYTES = 1 << 16  # and for each node: it has taken up to 53 kB,
MOST_ROOM_BYTES = 1 << 32  # but no more than this
MOST_COPIES = 8
MOST_S = 60.0
LONGEST_SIZES = 1 << 10  # entries that a vector of sizes may have
_NOT_SIZES = "not.sizes"  # the domain of nodes meanwhile, of which inference knows nothing
_POLL_S = 1e-3


def infer_shapes(
    model: onnx.ModelProto, *, strict_mode: bool = False, data_prop: bool = False
) -> onnx.ModelProto:
    """Return the model with the types that ONNX infers. Raises BadModel where they do not fit together."""
    try:
        with limited_memory(model):
            if strict_mode and data_prop:
                return _propagate_strictly(model)
            if data_prop:
                return _propagate_sizes(model)
            return onnx.shape_inference.infer_shapes(model, strict_mode=strict_mode)
    except Exception as error:  # C++ that raises more than its InferenceError
        raise BadModel(
            f"shapes do not fit: {str(error).strip() or type(error).__name__}",
            at="shape inference",
            fix="mend the node that is named, or the shape declared for its output",
        ) from error


def _propagate_sizes(model: onnx.ModelProto, strict_mode: bool = False) -> onnx.ModelProto:
    """Infer with values, but for those of long vectors whose readers' types are known without."""
    typed = onnx.shape_inference.infer_shapes(model, strict_mode=strict_mode)
    domains = _readers_of_vectors(typed.graph)
    for place in domains:
        typed.graph.node[place].domain = _NOT_SIZES
    typed.opset_import.append(onnx.helper.make_opsetid(_NOT_SIZES, 1))
    inferred = onnx.shape_inference.infer_shapes(typed, strict_mode=strict_mode, data_prop=True)
    for place, domain in domains.items():
        inferred.graph.node[place].domain = domain
    del inferred.opset_import[-1]
    return inferred


def _propagate_strictly(model: onnx.ModelProto) -> onnx.ModelProto:
    """Infer strictly, and with values: types decide where these take what are no shapes for shapes.

    ONNX takes any two vectors behind Unsqueeze for shapes, and their product for a misfit.
    """
    try:
        return _propagate_sizes(model, strict_mode=True)
    except onnx.shape_inference.InferenceError:
        return onnx.shape_inference.infer_shapes(_propagate_sizes(model), strict_mode=True)


def _readers_of_vectors(graph: onnx.GraphProto) -> dict[int, str]:
    """Map places of nodes that read long vectors, and whose outputs' shapes are known, to their domains."""
    declared = (*graph.input, *graph.value_info, *graph.output)
    shapes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in declared}
    shapes |= {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    vectors = {name for name, shape in shapes.items() if len(shape) == 1 and shape[0] > LONGEST_SIZES}
    if not vectors:
        return {}
    return {
        place: node.domain
        for place, node in enumerate(graph.node)
        if not vectors.isdisjoint(node.input) and all(all(shapes.get(name, [0])) for name in node.output)
    }


def try_inference(model: onnx.ModelProto) -> None:
    """Let a child of this process infer the shapes; raise BadModel if it crashes, or takes too much.

    What the inference says of the model does not count here: whoever infers shapes afterwards hears it again.
    """
    child = os.fork()
    if child == 0:
        os._exit(_be_child(model))
    deadline_s = time.monotonic() + MOST_S
    done = 0
    while not done and time.monotonic() < deadline_s:
        done, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0 if done else _POLL_S)
    if not done:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if status != 0:
        raise BadModel(
            "its shapes cannot be inferred: ONNX's inference crashes, or takes more than "
            f"{_room_of(model) >> 20} MB or {MOST_S:.0f} s",
            at="shape inference",
            fix="look for a constant that makes an enormous tensor, as the limit of a Range does",
        )


def _be_child(model: onnx.ModelProto) -> int:
    """Return the exit code: 0 if the inference came to an end."""
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # no traceback of a crash that is expected
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 2)
        with limited_memory(model):
            _propagate_sizes(model)
    except MemoryError:
        return 1
    except BaseException:
        return 0
    return 0


@contextmanager
def limited_memory(model: onnx.ModelProto, room_bytes: int | None = None) -> Iterator[None]:
    """Treat a model in a bounded part of the address space; beyond it, memory is refused: MemoryError.

    `room_bytes`: beside copies of the model; None: by how many nodes it has. The bound is the whole process's
    for that while: nothing else may take much memory then.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    taken_bytes = _address_space_bytes()
    if taken_bytes is None:
        yield
        return
    room_bytes = _room_of(model) if room_bytes is None else room_bytes
    limit_bytes = taken_bytes + room_bytes + MOST_COPIES * _bytes_of(model)
    soft = limit_bytes if before[0] == resource.RLIM_INFINITY else min(limit_bytes, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _room_of(model: onnx.ModelProto) -> int:
    nodes = len(model.graph.node) + sum(len(function.node) for function in model.functions)
    return min(ROOM_BYTES + NODE_BYTES * nodes, MOST_ROOM_BYTES)


def _bytes_of(model: onnx.ModelProto) -> int:
    """Return the bytes of a model with its external data, whose place and length were checked."""
    external = (t for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL)
    external_bytes: int = sum(8 * prod(tensor.dims) for tensor in external)
    return int(model.ByteSize()) + external_bytes


def _address_space_bytes() -> int | None:
    """Return what this process has of the address space, None where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[0]) * resource.getpagesize() if status.exists() else None


def run_constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return the outputs of a small graph without inputs, as ONNX Runtime computes them.

    Raises UnsupportedModel for an op and element type that it has no kernel for, BadModel where constants do
    not fit the nodes that read them.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4  # what goes wrong is raised, and may be expected
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, {}), strict=True))
    except NoKernel as error:
        raise UnsupportedModel(
            f"ONNX Runtime {ort.__version__} cannot compute a constant: {error}",
            at="constants of the graph",
            fix="store what that node makes as an initializer, or export the model in float32",
        ) from error
    except Exception as error:  # onnxruntime's errors share no narrower class
        raise BadModel(
            f"constants that cannot be computed: {error}",
            at=", ".join(f"node {node.name!r} ({node.op_type})" for node in model.graph.node[:3]),
            fix="mend the node that is named, or the constants that it reads",
        ) from error
