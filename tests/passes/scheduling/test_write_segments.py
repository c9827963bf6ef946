import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.layouts.configuration import data_parallel
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.write_segments import row_shape


def test_a_value_that_the_user_calls_counts_keeps_the_width_of_its_rows() -> None:
    graph, int64 = LoweredGraph(data_parallel(2).meshes), np.dtype(np.int64)
    pieces, whole = gs.Variable("words", dtype=int64), gs.Variable("words.counts", dtype=int64)
    sizes = gs.Variable("words.sizes", dtype=int64)
    graph.communicate("AllGatherRows", [pieces], [whole], received_counts=sizes, site="worker", axes=(0,))

    (node,) = graph.nodes

    assert row_shape(node, 0, {"words": (4, 3)}) == (None, 3)
    assert row_shape(node, 1, {"words": (4, 3)}) == (None,)
