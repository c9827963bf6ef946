"""Which rows of large tables a step touches: what the indices in the user's graph are for a batch."""

from collections.abc import Mapping

import numpy as np
import onnx

from partc.compiler.model_files.cut_model import cut_model, leaves_of, reached_from
from partc.compiler.verification.sessions import Array, Session
from partc.compiler.verification.split_step import SplitStep
from partc.compiler.verification.touched_rows import Uses, distinct_rows
from partc.runtime.plan.program import Plan


class RowsOfBatch:
    """Finds them, by replica in the first half of the graph, of all replicas together in the second."""

    def __init__(self, model: onnx.ModelProto, tables: Uses, split: SplitStep, plan: Plan) -> None:
        self._tables, self._split = tables, split
        self._sizes = {v.name: v.shape[0] for v in plan.variables if v.name in tables}
        graph = model.graph
        indices = dict.fromkeys(index for index_names in tables.values() for index in index_names)
        boundary = set(split.halves.gradients)
        behind = reached_from(graph, boundary, boundary) - boundary
        later = [index for index in indices if index in behind]
        self._ids = leaves_of(graph, later, boundary) & boundary if later else set()
        inputs = {info.name for info in graph.input}
        constants = {tensor.name for tensor in graph.initializer}
        self._early = [*dict.fromkeys([*(i for i in indices if i not in behind), *self._ids])]
        early_outputs = [name for name in self._early if name not in inputs | constants]
        self._first = Session(cut_model(model, {}, early_outputs), early_outputs)
        self._constants = {
            t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name in self._early
        }
        id_types = dict.fromkeys(self._ids, int(onnx.TensorProto.INT64))
        self._rest = Session(cut_model(model, id_types, later), later)

    def find(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the rows that a step touches, by table: int64[k] ascending."""
        if not self._tables:
            return {}
        parts = []
        for replica in range(self._split.replicas):
            share = {**self._constants, **self._split.share(inputs, replica)}
            parts.append(share | self._first.run(share))
        index_values = {
            name: np.concatenate([part[name].reshape(-1) for part in parts]) for name in self._early
        }
        ids = {name: np.concatenate([part[name] for part in parts], axis=0) for name in self._ids}
        index_values |= self._rest.run({**inputs, **ids})
        return {
            table: distinct_rows([index_values[index] for index in indices], self._sizes[table])
            for table, indices in self._tables.items()
        }
