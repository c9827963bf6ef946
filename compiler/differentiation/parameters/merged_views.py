"""Tell views apart that the exporter stored as one tensor, since they were equal when it wrote them.

    module     a.gamma[None] and b.gamma[None], both of ones      bias[:4] and bias[4:], both of zeros
    file       one initializer, `unsqueeze`                       one initializer, `slice_1`
    operation  mul(%x, %unsqueeze)  mul(%y, %unsqueeze_1)         add(%x, %slice_1)  add(%y, %slice_2)

An operation that read a view which is nowhere now, and whose node reads another's tensor, gets a tensor of
its own where its module has as many parameters that the file holds nowhere as it read such views. Else what
was merged is marked, for the user to be asked: trained as it is, several would be tied.
"""

from collections.abc import Iterator, Sequence
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
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    # Values that differ are equal by copying alone: such a view is read twice, and is the same.
    found = [
        at for at in _stand_ins(graph, facts) if not values_of(tensors[at.initializer], folder).are_distinct
    ]
    parameters = _parameters_of_views(found, facts)
    stored: set[str] = set()
    for at in found:
        if at.view in parameters:
            if at.view not in stored:
                _store(graph, tensors[at.initializer], at.view, parameters[at.view])
                stored.add(at.view)
            at.node.input[:] = [at.view if name == at.initializer else name for name in at.node.input]
        else:
            mark_undecided(graph, at.initializer, MERGED)


def _parameters_of_views(found: Sequence[_StandIn], facts: ExporterFacts) -> dict[str, str]:
    """Return the parameter of each view that is gone, where its module has as many left as such views.

    Which of them is whose does not matter: they are equal.
    """
    owned = set(facts.kinds).union(*facts.folded_from.values())
    missing: dict[str, list[str]] = {}
    for target in facts.targets.values():
        if target not in owned:
            missing.setdefault(target.rpartition(".")[0], []).append(target)
    views: dict[str, list[str]] = {}
    for at in found:
        of_module = views.setdefault(module_of(at.node), [])
        if at.view not in of_module:
            of_module.append(at.view)
    return {
        view: parameter
        for module, of_module in views.items()
        if len(of_module) == len(missing.get(module, ()))
        for view, parameter in zip(of_module, missing[module], strict=True)
    }


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
