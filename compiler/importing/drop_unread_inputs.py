"""Take away the data inputs that no output depends on.

    before   x, mask -> loss, W_next        after   x -> loss, W_next        nothing reads mask

Such an input has no sample axis and no data of its own: what is compiled, trained and verified does
without it.
"""

import msgspec
import onnx

from partc.compiler.cut_model import leaves_of, needed_for
from partc.compiler.importing.bindings import Bindings


def drop_unread_inputs(graph: onnx.GraphProto, bindings: Bindings) -> tuple[tuple[str, ...], Bindings]:
    """Drop unread data inputs in place, and the nodes that read them; return their names."""
    outputs = [info.name for info in graph.output]
    kept = leaves_of(graph, outputs, ()) | bindings.state.keys() | bindings.shards.keys()
    unread = tuple(info.name for info in graph.input if info.name not in kept)
    if not unread:
        return (), bindings
    needed = needed_for(graph, outputs)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in needed]
    inputs = [info for info in graph.input if info.name in kept]
    del graph.node[:], graph.input[:]
    graph.node.extend(nodes)
    graph.input.extend(inputs)
    axes = {name: axis for name, axis in bindings.sample_axes.items() if name not in unread}
    return unread, msgspec.structs.replace(bindings, sample_axes=axes)
