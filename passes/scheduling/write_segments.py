"""Turn a chunk of nodes into one ONNX model, a segment: here the step leaves graphsurgeon."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper, numpy_helper
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

from partc.passes.cpu_kernels.align_scalars import align_scalars
from partc.passes.cpu_kernels.block_updates import block_updates
from partc.passes.cpu_kernels.divide_once import divide_once
from partc.passes.cpu_kernels.halve_by_quotient import halve_by_quotient
from partc.passes.cpu_kernels.round_halves import round_halves
from partc.passes.cpu_kernels.transpose_products import transpose_products
from partc.passes.cpu_kernels.winograd import choose_bodies
from partc.passes.gpu_kernels.rewrite_for_gpu import rewrite_for_gpu
from partc.passes.graph.infer_shapes import infer_shapes
from partc.passes.graph.training_graph import IR_VERSION
from partc.passes.lowering.lowered_graph import is_communication
from partc.passes.scheduling.schedule import Chunk

PartialShape = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """What a program must know of a segment. `races`: a ScatterND adds in it (see Run.one_thread)."""

    path: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    races: bool


@dataclass
class SegmentWriter:
    """Writes segments one after the other, remembering the types of what crosses them.

    `save` stores the segment of a chunk and returns its path in the plan's folder.
    """

    opset: int
    functions: Mapping[str, onnx.FunctionProto]  # by name
    save: Callable[[onnx.ModelProto, Chunk], str]
    shapes: dict[str, PartialShape]  # value -> one rank's shape where known
    on_cpu: bool = True  # workers' segments run on CPUs
    dtypes: dict[str, np.dtype] = field(default_factory=dict)
    names_kernels: ClassVar[bool] = True

    def make(self, chunk: Chunk, read_later: set[str], in_place: AbstractSet[str]) -> Segment:
        """Write a chunk, unless nobody wants anything of it; see `write`."""
        model = self.write(chunk, read_later, in_place)
        writes = tuple(output.name for output in model.graph.output)
        path = self.save(model, chunk) if writes else ""
        return Segment(path, tuple(entry.name for entry in model.graph.input), writes, _races(model))

    def write(self, chunk: Chunk, read_later: set[str], in_place: AbstractSet[str]) -> onnx.ModelProto:
        """Return the chunk as a model whose outputs are those of its values that are `read_later`.

        `in_place`: values that are written over a variable.
        """
        produced = [t for node in chunk.nodes for t in node.outputs if t.name]
        names = {tensor.name for tensor in produced}
        inputs: dict[str, gs.Tensor] = {}
        constants: dict[str, gs.Constant] = {}
        for node in chunk.nodes:
            for tensor in node.inputs:
                if isinstance(tensor, gs.Constant):
                    constants[tensor.name] = tensor
                elif tensor.name and tensor.name not in names:
                    inputs[tensor.name] = tensor
        outputs = [tensor for tensor in produced if tensor.name in read_later]
        self.dtypes.update((t.name, np.dtype(t.dtype)) for t in [*inputs.values(), *produced])
        nodes = [OnnxExporter.export_node(node) for node in chunk.nodes]
        weights = [numpy_helper.from_array(np.asarray(t.values), name) for name, t in constants.items()]
        graph = helper.make_graph(
            nodes,
            "segment",
            [self._describe(name) for name in inputs],
            [helper.make_empty_tensor_value_info(tensor.name) for tensor in outputs],
            weights,
        )
        model = self._model(graph)
        divide_once(model)
        halve_by_quotient(model)
        # Servers compute on CPUs wherever workers do.
        return self._typed(model, in_place, self.on_cpu or chunk.site == "server")

    def _describe(self, name: str) -> onnx.ValueInfoProto:
        dtype = helper.np_dtype_to_tensor_dtype(self.dtypes[name])
        return helper.make_tensor_value_info(name, dtype, self.shapes.get(name))

    def _model(self, graph: onnx.GraphProto) -> onnx.ModelProto:
        used = functions_used(graph.node, self.functions)
        domains = sorted({function.domain for function in used})
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(d, 1) for d in domains)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, functions=used)

    def _typed(self, model: onnx.ModelProto, in_place: AbstractSet[str], on_cpu: bool) -> onnx.ModelProto:
        """Give the outputs types, inferred from the inputs'."""
        inferred = infer_shapes(model, data_prop=True)
        for output in inferred.graph.output:
            kind = output.type.tensor_type
            if kind.HasField("shape"):
                known = tuple(d.dim_value if d.HasField("dim_value") else None for d in kind.shape.dim)
                self.shapes.setdefault(output.name, known)
        described = [self._describe(output.name) for output in model.graph.output]
        del model.graph.output[:]
        model.graph.output.extend(described)
        if on_cpu:
            block_updates(model, inferred, in_place)
            transpose_products(model, inferred)
            choose_bodies(model, inferred)
            round_halves(model, inferred)
        else:
            model, inferred = rewrite_for_gpu(model)
        align_scalars(model, inferred)
        _describe_values(model, inferred)
        return model


def _describe_values(model: onnx.ModelProto, inferred: onnx.ModelProto) -> None:
    """Tell the types of what is passed on within a segment; `inferred`: what it was before rewriting."""
    graph = model.graph
    passed_on = {name for node in graph.node for name in node.output if name}
    passed_on -= {output.name for output in graph.output}
    known = [value for value in inferred.graph.value_info if _is_known(value) and value.name in passed_on]
    if len(known) < len(passed_on):
        known = [value for value in infer_shapes(model).graph.value_info if _is_known(value)]
    for value in known:
        for dim in value.type.tensor_type.shape.dim:
            dim.ClearField("dim_param")  # a name that inference makes up
    graph.value_info.extend(known)


def _is_known(value: onnx.ValueInfoProto) -> bool:
    kind = value.type.tensor_type
    return bool(kind.elem_type) and kind.HasField("shape")


def functions_used(
    nodes: Sequence[onnx.NodeProto], functions: Mapping[str, onnx.FunctionProto]
) -> list[onnx.FunctionProto]:
    """Return the functions that nodes call, and those that these call."""
    functions_by_name: dict[str, onnx.FunctionProto] = {}
    pending = list(nodes)
    while pending:
        function = functions.get(pending.pop().op_type)
        if function is not None and function.name not in functions_by_name:
            functions_by_name[function.name] = function
            pending.extend(function.node)
    return [functions_by_name[name] for name in sorted(functions_by_name)]


def _races(model: onnx.ModelProto) -> bool:
    """Tell whether a ScatterND adds in it: with duplicate indices that races on several threads."""
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    return any(adds_in_place(node) for body in bodies for node in body)


def adds_in_place(node: onnx.NodeProto) -> bool:
    """Tell whether a node is a ScatterND that adds, or reduces otherwise."""
    return node.op_type == "ScatterND" and any(a.name == "reduction" for a in node.attribute)


def row_shape(node: gs.Node, index: int, shapes: Mapping[str, PartialShape]) -> PartialShape | None:
    """Return the shape of a row communication's result: as its value's, any number of rows.

    None where not even the value's rank is known.
    """
    assert is_communication(node)
    if index >= node.attrs["values"]:
        return (None,)  # counts
    operand = shapes.get(node.inputs[index].name)
    return None if operand is None else (None, *operand[1:])
