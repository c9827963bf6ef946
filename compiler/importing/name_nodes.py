"""Names that a file may leave out, and the compiler goes by."""

import onnx

from partc.passes.graph.operation_builder import OperationBuilder


def name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node a name of its own."""
    used_names: set[str] = set()
    for index, node in enumerate(graph.node):
        if not node.name or node.name in used_names:
            node.name = f"{node.op_type}_{index}"
        while node.name in used_names:
            node.name += "_"
        used_names.add(node.name)


def name_outputs(graph: onnx.GraphProto) -> None:
    """Name the outputs that nodes leave out, so that no input that is left out seems to read one."""
    names = OperationBuilder(name for node in graph.node for name in (*node.input, *node.output))
    for node in graph.node:
        while len(node.output) > 1 and not node.output[-1]:
            node.output.pop()
        node.output[:] = [name or names.fresh(f"{node.name}.left_out") for name in node.output]
