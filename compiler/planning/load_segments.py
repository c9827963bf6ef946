"""Open every segment in ONNX Runtime while compiling: what cannot run is found before anything is written.

A segment is opened as its executor will open it, on the CPU provider, which is everywhere. What only GPUs
will run may use kernels that CPUs lack: there onnx.checker has the last word.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnxruntime
from onnx import shape_inference
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

from partc.runtime.errors import InternalError, PartcError, UnsupportedModel
from partc.runtime.execution.device import CPU, disabled_optimizers, open_session
from partc.runtime.plan.program import Plan, Run

# How ONNX Runtime names a node in its messages.
_NODE = re.compile(
    r"node with name '([^']+)'|same node name \(([^)]+)\)|[Nn]ode[ :]*\(([^)]+)\)|Name:'([^']+)'"
)


def load_segments(folder: Path, plan: Plan, only: Iterable[str] | None = None) -> None:
    """Open each distinct segment of a plan once; `only`: of these paths.

    Raises UnsupportedModel for what has no kernel, InternalError for a segment that is wrong.
    """
    segments_to_load = None if only is None else set(only)
    disabled = disabled_optimizers(plan)
    for segment, kinds in sorted(_kinds(plan).items()):
        if segments_to_load is None or segment in segments_to_load:
            _load(folder / segment, segment, disabled, on_cpu="cpu" in kinds)


def _kinds(plan: Plan) -> dict[str, set[str]]:
    """Return segment -> the kinds of devices that run it."""
    kinds: dict[str, set[str]] = {}
    for run in plan.instructions:
        if isinstance(run, Run):
            kinds_of_segment = kinds.setdefault(run.segment, set())
            kinds_of_segment.update(rank.kind for rank in plan.ranks if run.site in rank.sites)
            kinds_of_segment.update(worker.kind for worker in plan.asynchronous)
    return kinds


def _load(path: Path, segment: str, disabled: tuple[str, ...], on_cpu: bool) -> None:
    try:
        open_session(path, CPU, disabled, reuses_memory=False)  # nothing is run
    except NoKernel as error:
        if on_cpu:
            raise _refusal(path, segment, error) from error
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:  # onnxruntime's errors share no narrower class
        raise _refusal(path, segment, error) from error


def _refusal(path: Path, segment: str, error: Exception) -> PartcError:
    message = str(error).split(" : ", 3)[-1]  # behind "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : "
    match = _NODE.search(message)
    name = next(filter(None, match.groups()), None) if match else None
    what = f"ONNX Runtime {onnxruntime.__version__} cannot run a segment: {message.strip()}"
    place = f"{segment}" if name is None else f"node {name!r}{_describe_node(path, name)} in {segment}"
    if isinstance(error, NoKernel):
        return UnsupportedModel(
            what,
            at=place,
            fix="convert the model to an element type that the op has a kernel for, such as float32",
        )
    return InternalError(
        what,
        at=place,
        fix="this is a mistake of partc's own: report it with the model; another --strategy may avoid it",
    )


def _describe_node(path: Path, name: str) -> str:
    """Return the op of a segment's node and the element types that it reads, as far as they are known."""
    model = shape_inference.infer_shapes(onnx.load(path))
    graph = model.graph
    values = (*graph.input, *graph.value_info, *graph.output)
    elements = {value.name: value.type.tensor_type.elem_type for value in values}
    elements |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.name == name:
            input_types = [onnx.TensorProto.DataType.Name(elements.get(x, 0)).lower() for x in node.input]
            return f" ({node.op_type} of {', '.join(input_types)})"
    return ""
