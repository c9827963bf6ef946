"""Let dense gradients be rounded to 16 bits before they are sent.

before   dW ── AllReduce ── dW                        after   dW ── AllReduce <rounds_to = bfloat16> ── dW
         dV ── Push ── dV, owned                              dV ── Push <rounds_to = bfloat16> ── dV, owned

Only what is shaped like a parameter of some size is: a loss or a norm that travels along costs nothing,
and everything depends on it.
"""

from math import prod

import numpy as np

from partc.passes.graph.facts import Facts
from partc.passes.layouts.layouts import WORKER
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.runtime.plan.program import Rounding

LEAST_ELEMENTS = 1024


def round_sums(lowered: LoweredGraph, facts: Facts, shapes: set[tuple[int, ...]], rounding: Rounding) -> None:
    """Mark the sums of values float32[shape] whose shape is a parameter's."""
    for node in lowered.nodes:
        if node.op not in ("AllReduce", "Push") or node.attrs.get("site", WORKER) != WORKER:
            continue
        tensor, _ = lowered.meanings.get(node.outputs[0].name, (None, None))
        is_sum = (node.attrs.get("reduction") or "sum") == "sum"
        if tensor is None or tensor not in facts.fixed_shapes or not is_sum:
            continue
        shape = tuple(facts.shape(tensor))
        if np.dtype(node.inputs[0].dtype) == np.float32 and shape in shapes and prod(shape) >= LEAST_ELEMENTS:
            node.attrs["rounds_to"] = rounding
