"""Make aggregated gradients outputs of the step, for workers that record them.

    dW ──┬── update                        before
         └── Identity ── W.aggregated      after    whole on every worker: of servers it is pulled

    (ids, rows) ──┬── update
                  └── SumRows ── E.aggregated.ids, E.aggregated.rows      ids ascend, each once

One owner still applies each update; whoever else wants the aggregated gradient reads it from there
(parallax.txt, section 6). Under AllReduce a sparse gradient is whole: its ids are all rows.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.training_graph import Gradient, TrainingGraph
from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN, SUM_ROWS, sum_rows_function
from partc.passes.rules.sharding_rules import is_sum_rows
from partc.runtime.errors import BadStrategy, BadUsage, some_of


def fetch_gradients(
    training: TrainingGraph, parameters: Sequence[str], *, in_file: bool = False
) -> TrainingGraph:
    """Return the graph with the aggregated gradients of `parameters`, each once, as further outputs.

    `in_file`: a strategy file names them. Raises BadUsage for others, of a file BadStrategy.
    """
    if unknown := sorted(set(parameters) - training.gradients.keys()):
        refusal = BadStrategy if in_file else BadUsage
        raise refusal(
            f"{unknown[0]!r} has no gradient",
            at="aggregation: fetched" if in_file else "--fetch-gradients",
            fix=f"name parameters among {some_of(sorted(training.gradients))}",
        )
    if not parameters:
        return training
    fetching = _Fetching(training)
    fetched = [name for parameter in parameters for name in fetching.fetch(training.gradients[parameter])]
    return replace(training, outputs=(*training.outputs, *fetched), functions=fetching.functions)


class _Fetching:
    def __init__(self, training: TrainingGraph) -> None:
        self.graph = training.graph
        self.opset = training.opset
        self.functions = list(training.functions)
        self.tensors = training.graph.tensors()

    def fetch(self, gradient: Gradient) -> tuple[str, ...]:
        """Append what makes a gradient's outputs, and return their names."""
        name = f"{gradient.parameter}.aggregated"
        if not gradient.is_sparse:
            assert gradient.dense is not None
            self._copy(self.tensors[gradient.dense], name)
            return (name,)
        ids, rows = self._summed(gradient, name)
        self._copy(ids, f"{name}.ids")
        self._copy(rows, f"{name}.rows")
        return f"{name}.ids", f"{name}.rows"

    def _summed(self, gradient: Gradient, name: str) -> tuple[gs.Tensor, gs.Tensor]:
        """Return unique ids and summed rows: the update's own where it sums them."""
        assert gradient.ids is not None and gradient.rows is not None
        ids, rows = self.tensors[gradient.ids], self.tensors[gradient.rows]
        for node in rows.outputs:
            if is_sum_rows(node) and node.inputs[0] is ids:
                return tuple(node.outputs)
        if not any(function.name == SUM_ROWS for function in self.functions):
            self.functions.append(sum_rows_function(self.opset))
        results = (
            gs.Variable(f"{name}.sum.ids", dtype=np.dtype(np.int64)),
            gs.Variable(f"{name}.sum.rows", dtype=rows.dtype),
        )
        self.graph.nodes.append(
            gs.Node(SUM_ROWS, f"{name}.sum", {}, [ids, rows], list(results), domain=FUNCTION_DOMAIN)
        )
        return results

    def _copy(self, source: gs.Tensor, name: str) -> None:
        output = gs.Variable(name, dtype=source.dtype, shape=source.shape)
        self.graph.nodes.append(gs.Node("Identity", name, {}, [source], [output]))
        self.graph.outputs.append(output)
