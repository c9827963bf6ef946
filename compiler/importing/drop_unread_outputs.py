"""Leave out what an op makes only if it is asked to, and nobody reads.

    before   y, indices = MaxPool (x)     out, key, value = Attention (q, k, v)     read: y and out
    after    y = MaxPool (x)              out = Attention (q, k, v)

What is named from then on is read: a MaxPool that makes Indices runs on all samples at once, another on some.
"""

from collections.abc import Collection, Set

import onnx

from partc.compiler.model_files.cut_model import needed_for, reads_of
from partc.passes.graph.bodies import nodes_of

OPTIONAL = onnx.defs.OpSchema.FormalParameterOption.Optional
KEPT = frozenset({"BatchNormalization"})  # up to opset 13, that it makes them says that it trains


def drop_unread_outputs(model: onnx.ModelProto, named: Collection[str] = ()) -> None:
    """Drop, in place, optional outputs of the standard's ops that lead to no output, and what reads those.

    `named`: tensors beside the outputs that somebody asks for.
    """
    version = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    wanted = {*(value.name for value in model.graph.output), *named}
    needed = needed_for(model.graph, wanted)
    read = wanted.union(*map(reads_of, needed))
    del model.graph.node[:]
    model.graph.node.extend(needed)
    for node in nodes_of(model.graph):
        is_standard = node.domain in ("", "ai.onnx") and onnx.defs.has(node.op_type, version)
        if len(node.output) > 1 and is_standard and node.op_type not in KEPT:
            formal = onnx.defs.get_schema(node.op_type, version).outputs
            _drop_of_node(node, read, [output.option == OPTIONAL for output in formal])


def _drop_of_node(node: onnx.NodeProto, read: Set[str], is_optional: list[bool]) -> None:
    """Drop all but the first, which names the node."""
    names = list(node.output)
    for place, name in enumerate(names[1 : len(is_optional)], 1):
        if is_optional[place] and name not in read:
            names[place] = ""
    while not names[-1]:
        names.pop()
    node.output[:] = names
