"""The bodies of If, Loop and Scan, and the nodes in them."""

from collections.abc import Iterator

import onnx


def nodes_of(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph and of its bodies."""
    for node in graph.node:
        yield node
        for body in subgraphs_of(node):
            yield from nodes_of(body)


def subgraphs_of(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the bodies of an If, Loop or Scan; nothing for other ops."""
    subgraphs = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    for attribute in node.attribute:
        subgraphs += list(attribute.graphs)
    return subgraphs
