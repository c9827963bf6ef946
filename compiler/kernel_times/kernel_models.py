"""A kernel as a model that can be run: some copies of it, each on operands of its own.

    MatMul(float32[32,512], float32[512,64])      c0.y0 = MatMul (c0.0, c0.1)   c1.y0 = MatMul (c1.0, c1.1)

It goes through what segments go through for a CPU (write_segments.py), so that its body is the one that a
segment would have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  # lets numpy know bfloat16 by name
import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper, numpy_helper
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

from partc.passes.graph.infer_shapes import infer_shapes
from partc.passes.graph.training_graph import IR_VERSION
from partc.passes.scheduling.kernels import Kernel, Operand, body_of
from partc.passes.scheduling.schedule import Chunk
from partc.passes.scheduling.write_segments import SegmentWriter, functions_used

RANDOM_BLOCK = 1 << 16  # elements that are drawn; larger tensors repeat them


class CannotRun(Exception):
    """A kernel that cannot be run by itself; says why."""


@dataclass(frozen=True)
class KernelLibrary:
    """What kernels are made with: the functions that they may call, and the version of ONNX's operators."""

    opset: int
    functions: Mapping[str, onnx.FunctionProto]
    on_cpu: bool

    def model(self, kernel: Kernel, copies: int) -> onnx.ModelProto:
        """Return a model of copies of a kernel. Raises CannotRun for a function that is not known."""
        if kernel.body and (
            kernel.op not in self.functions or body_of(kernel.op, self.functions) != kernel.body
        ):
            raise CannotRun(f"no function {kernel.op} with this body")
        shapes: dict[str, tuple[int | None, ...]] = {}
        dtypes = self._result_dtypes(kernel)
        nodes = [node for copy in range(copies) for node in _nodes(kernel, copy, dtypes, shapes)]
        read_later = {
            tensor.name for node in nodes if node.name == node.outputs[0].name for tensor in node.outputs
        }
        writer = SegmentWriter(self.opset, self.functions, lambda model, chunk: "", shapes, self.on_cpu)
        return writer.write(Chunk("worker", nodes), read_later, frozenset())

    def _result_dtypes(self, kernel: Kernel) -> list[np.dtype]:
        """Return the element types of a kernel's results. Raises CannotRun where they cannot be inferred."""
        shapes: dict[str, tuple[int | None, ...]] = {}
        unknown = [np.dtype(np.float32)] * kernel.results
        nodes = _nodes(kernel, 0, unknown, shapes)
        read = {t.name: t for node in nodes for t in node.inputs if t.name in shapes}
        constants = [t for node in nodes for t in node.inputs if isinstance(t, gs.Constant)]
        graph = helper.make_graph(
            [OnnxExporter.export_node(node) for node in nodes],
            "kernel",
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(t.dtype), shapes[name])
                for name, t in read.items()
            ],
            [helper.make_empty_tensor_value_info(tensor.name) for tensor in nodes[-1].outputs],
            [numpy_helper.from_array(np.asarray(t.values), t.name) for t in constants],
        )
        functions = functions_used(graph.node, self.functions)
        domains = sorted({function.domain for function in functions})
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(d, 1) for d in domains)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, functions=functions)
        types = [output.type.tensor_type.elem_type for output in infer_shapes(model).graph.output]
        if not all(types):
            raise CannotRun("its results' types cannot be inferred")
        return [helper.tensor_dtype_to_np_dtype(element) for element in types]


def _nodes(
    kernel: Kernel, copy: int, dtypes: Sequence[np.dtype], shapes: dict[str, tuple[int | None, ...]]
) -> list[gs.Node]:
    """Return a copy of a kernel, behind the Transposes that it reads through. Fills in `shapes`."""
    before: list[gs.Node] = []
    operands: list[gs.Tensor] = []
    for place, operand in enumerate(kernel.operands):
        if isinstance(operand, int):
            operands.append(operands[operand])
        elif operand is None:
            operands.append(gs.Variable.empty())
        else:
            tensor = _tensor(operand, f"c{copy}.{place}", shapes)
            if operand.transposed:
                through = gs.Variable(f"{tensor.name}.transposed", dtype=tensor.dtype)
                order = {"perm": list(operand.transposed)}
                before.append(gs.Node("Transpose", f"{tensor.name}.turn", order, [tensor], [through]))
                tensor = through
            operands.append(tensor)
    results = [gs.Variable(f"c{copy}.y{n}", dtype=dtype) for n, dtype in enumerate(dtypes)]
    attributes: dict[str, object] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in kernel.attributes
    }
    node = gs.Node(kernel.op, results[0].name, attributes, operands, results, domain=kernel.domain or None)
    return [*before, node]


def _tensor(operand: Operand, name: str, shapes: dict[str, tuple[int | None, ...]]) -> gs.Tensor:
    dtype = np.dtype(operand.dtype)
    if operand.values is not None:
        return gs.Constant(name, np.array(operand.values, dtype).reshape(operand.shape))
    shapes[name] = operand.shape
    return gs.Variable(name, dtype=dtype, shape=list(operand.shape))


# ---------------------------------------------------------------- what it is fed


def feeds_of(kernel: Kernel, rng: np.random.Generator) -> list[np.ndarray | None]:
    """Return values for a kernel's operands, None where it needs none: numbers from 0.5 to 1.5, and indices
    that are in range."""
    return [
        _draw(operand, _bound(kernel, place), rng)
        if isinstance(operand, Operand) and operand.values is None
        else None
        for place, operand in enumerate(kernel.operands)
    ]


def _draw(operand: Operand, bound: int, rng: np.random.Generator) -> np.ndarray:
    dtype = np.dtype(operand.dtype)
    size = int(np.prod(operand.shape, dtype=np.int64))
    count = max(1, min(size, RANDOM_BLOCK))
    block: np.ndarray
    if dtype.kind == "b":
        block = rng.integers(0, 2, count)
    elif dtype.kind in "iu":
        block = rng.integers(0, max(1, min(bound, np.iinfo(dtype).max)), size or 1)
    else:
        block = rng.random(count, np.float32) + np.float32(0.5)
    return np.resize(block.astype(dtype), operand.shape)


def _bound(kernel: Kernel, place: int) -> int:
    """Return what integers of an operand have to be less than."""
    first = kernel.operands[0]
    if isinstance(first, Operand) and kernel.op in ("Gather", "GatherElements", "ScatterElements"):
        axis = next((value for name, value in kernel.attributes if name == "axis"), 0)
        assert isinstance(axis, int)
        return first.shape[axis] if first.shape else 1
    tensors = [operand for operand in kernel.operands if isinstance(operand, Operand)]
    return min((size for tensor in tensors for size in tensor.shape if size > 1), default=2)
