"""One version for each operator set, where a model imports a set several times.

    "" 19, "ai.onnx" 19, "" 12        the standard (onnx.proto): the highest, 19
                                      onnxruntime 1.31, onnx.checker: the last, 12

Where both give a model the same meaning it is read; where one of them cannot be meant, because a node has
attributes or inputs that its version does not know, the other is taken; anything else is refused.
"""

from collections.abc import Iterable, Iterator

import onnx

from partc.runtime.errors import BadModel

STANDARD = ("", "ai.onnx")


def merge_opsets(model: onnx.ModelProto) -> None:
    """Leave one import of each domain in place. Raises BadModel where versions differ in meaning."""
    _merge(model.opset_import, model.graph.node)
    for function in model.functions:
        _merge(function.opset_import, function.node)


def _merge(imports: "list[onnx.OperatorSetIdProto]", nodes: Iterable[onnx.NodeProto]) -> None:
    versions: dict[str, list[int]] = {}
    for opset in imports:
        versions.setdefault("" if opset.domain in STANDARD else opset.domain, []).append(opset.version)
    if len(versions) == len(imports):
        return
    all_nodes = list(_with_bodies(nodes))
    merged = {domain: _choose(domain, imported, all_nodes) for domain, imported in versions.items()}
    del imports[:]
    imports.extend(onnx.helper.make_opsetid(domain, version) for domain, version in merged.items())


def _choose(domain: str, imported: list[int], nodes: Iterable[onnx.NodeProto]) -> int:
    """Return the version that is meant: the highest, by the standard, unless only the last can be."""
    highest, last = max(imported), imported[-1]
    if highest == last:
        return highest
    own = [node for node in nodes if ("" if node.domain in STANDARD else node.domain) == domain]
    possible = [version for version in (highest, last) if all(_fits(node, version) for node in own)]
    if len(possible) == 1:
        return possible[0]
    for node in own:
        if not possible or not _means_the_same(node, highest, last):
            versions = " and ".join(map(str, imported))
            raise BadModel(
                f"operator set {domain or 'ai.onnx'!r} is imported as {versions}, and "
                f"the model {'is valid in neither' if not possible else 'means different things in them'}",
                at=f"opset_import; node {node.name or next(iter(node.output), '')!r} ({node.op_type})",
                fix=f"keep one: the standard takes the highest, {highest}, onnxruntime the last, {last}",
            )
    return highest


def _fits(node: onnx.NodeProto, version: int) -> bool:
    """Tell whether an operator set has a node's op, with its attributes and as many inputs."""
    schema = _schema(node, version)
    if schema is None:
        return False
    attributes_exist = {attribute.name for attribute in node.attribute} <= schema.attributes.keys()
    return attributes_exist and schema.min_input <= len(node.input) <= schema.max_input


def _means_the_same(node: onnx.NodeProto, one: int, other: int) -> bool:
    """Tell whether two versions of an op differ in types, or in what the node does not use, at most."""
    first, second = _schema(node, one), _schema(node, other)
    if first is None or second is None:
        return False
    common = first.attributes.keys() & second.attributes.keys()
    return all(
        first.attributes[name].default_value == second.attributes[name].default_value for name in common
    )


def _schema(node: onnx.NodeProto, version: int) -> "onnx.defs.OpSchema | None":
    domain = "" if node.domain in STANDARD else node.domain
    try:
        return onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError:
        return None


def _with_bodies(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _with_bodies(body.node)
