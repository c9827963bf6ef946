"""Tell views apart that the exporter stored as one tensor, since they were equal when it wrote them.

    module     a.gamma[None] and b.gamma[None], both of ones      bias[:4] and bias[4:], both of zeros
    file       one initializer, `unsqueeze`                       one initializer, `slice_1`
    operation  mul(%x, %unsqueeze)  mul(%y, %unsqueeze_1)         add(%x, %slice_1)  add(%y, %slice_2)

An operation that read a view which is nowhere now, and whose node reads another's tensor, gets a tensor of
its own where one parameter of its module is left that the file holds nowhere. Else what was merged is marked,
for the user to be asked: trained as it is, several would be tied.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import helper

from partc.compiler.differentiation.parameters.exporter_facts import (
    FOLDED_FROM,
    ExporterFacts,
    mark_undecided,
    module_of,
    tensors_read,
)
from partc.compiler.differentiation.parameters.folded import MERGED, is_view_name
from partc.compiler.differentiation.parameters.value_patterns import values_of


@dataclass(frozen=True, slots=True)
class _StandIn:
    """A node that reads an initializer in place of a view that is gone."""

    node: onnx.NodeProto
    initializer: str
    view: str


def separate_views(graph: onnx.GraphProto, facts: ExporterFacts, folder: Path | None) -> None:
    """Give views tensors of their own, in place, or mark the one that stands for several."""
    owned = set(facts.kinds).union(*facts.folded_from.values())
    missing = [target for target in facts.targets.values() if target not in owned]
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    parameters: dict[str, str] = {}  # view -> the parameter that it is of
    for found in list(_stand_ins(graph, facts)):
        if found.view not in parameters:
            left = [name for name in missing if name.rpartition(".")[0] == module_of(found.node)]
            if len(left) == 1:
                missing.remove(left[0])
                parameters[found.view] = left[0]
                _store(graph, tensors[found.initializer], found.view, left[0])
        if found.view in parameters:
            reads = found.node.input
            reads[:] = [found.view if name == found.initializer else name for name in reads]
        elif not values_of(tensors[found.initializer], folder).are_distinct:
            # Values that differ are equal by copying alone: the view is read twice, and is the same.
            mark_undecided(graph, found.initializer, MERGED)


def _stand_ins(graph: onnx.GraphProto, facts: ExporterFacts) -> Iterator[_StandIn]:
    values = (*graph.input, *graph.initializer)
    present = {value.name for value in values}.union(facts.targets, *(node.output for node in graph.node))
    views = {
        name
        for name, sources in facts.folded_from.items()
        if facts.parameters_in(sources) and is_view_name(name)
    }
    for node in graph.node:
        reads = tensors_read(node)
        gone = [name for name in dict.fromkeys(reads) if name not in present and is_view_name(name)]
        foreign = [name for name in node.input if name in views and name not in reads]
        if len(gone) == len(foreign) == 1:
            yield _StandIn(node, foreign[0], gone[0])


def _store(graph: onnx.GraphProto, tensor: onnx.TensorProto, view: str, parameter: str) -> None:
    copy = graph.initializer.add()
    copy.CopyFrom(tensor)
    copy.name = view
    info = helper.make_tensor_value_info(view, tensor.data_type, list(tensor.dims))
    info.metadata_props.add(key=FOLDED_FROM, value=repr([parameter]))
    graph.value_info.append(info)
