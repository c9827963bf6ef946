"""Constants in place of known sizes and of what is computed of constants alone.

ONNX Runtime reads sizes on the CPU, computes there what depends on them (its GetCpuPreferredNodes), and
replays no segment with a node there. What a segment ends with is not folded: a constant would be copied in
every run.
"""

from math import prod

import numpy as np
import onnx
from onnx import helper

from partc.passes.cpu_kernels.segment_values import is_node
from partc.passes.gpu_kernels.gpu_segment import GpuSegment
from partc.passes.graph.facts import SMALL
from partc.passes.graph.infer_shapes import run_constants

_DRAWING = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike"})
_DRAWING |= {"Bernoulli", "Multinomial", "Dropout"}


def fold_constants(segment: GpuSegment) -> None:
    """Fix what is known of a segment, in place."""
    segment.rewrite(lambda node: [] if _fixes_size(segment, node) else [node])
    folded: list[onnx.NodeProto] = []
    known = set(segment.constants)
    for node in segment.graph.node:
        if _is_foldable(segment, node, known):
            folded.append(node)
            known.update(node.output)
    if not folded:
        return
    values = run_constants(_model_of(segment, folded))
    made = {name for node in folded for name in node.output if name}
    for name in sorted(made):
        segment.fix(name, values[name])
    segment.rewrite(lambda node: [] if made.issuperset(node.output) else [node])


def _fixes_size(segment: GpuSegment, node: onnx.NodeProto) -> bool:
    is_size = is_node(node, "Shape") or is_node(node, "Size")
    sizes = segment.sizes(node.input[0]) if is_size and node.output[0] not in segment.outputs else None
    if sizes is None:
        return False
    attributes = {each.name: each.i for each in node.attribute}
    part = sizes[attributes.get("start", 0) : attributes.get("end")]
    segment.fix(node.output[0], np.array(part if node.op_type == "Shape" else prod(sizes), np.int64))
    return True


def _is_foldable(segment: GpuSegment, node: onnx.NodeProto, known: set[str]) -> bool:
    has_body = any(each.type == onnx.AttributeProto.GRAPH for each in node.attribute)
    if node.domain or has_body or node.op_type in _DRAWING or segment.outputs & set(node.output):
        return False
    sizes = [segment.sizes(name) for name in node.output if name]
    is_small = all(size is not None and prod(size) <= SMALL for size in sizes)
    return (
        is_small
        and (node.op_type == "Constant" or bool(node.input))
        and known.issuperset(filter(None, node.input))
    )


def _model_of(segment: GpuSegment, nodes: list[onnx.NodeProto]) -> onnx.ModelProto:
    reads = {name for node in nodes for name in node.input}
    weights = [each for each in segment.graph.initializer if each.name in reads]
    outputs = [helper.make_empty_tensor_value_info(name) for node in nodes for name in node.output if name]
    graph = helper.make_graph(nodes, "constants", [], outputs, weights)
    return helper.make_model(
        graph, opset_imports=segment.model.opset_import, ir_version=segment.model.ir_version
    )
