"""Measure which rows of each table a sample of the training data touches.

                  ┌── the nodes between, run by ONNX Runtime ──┐
    data inputs ──┤   Reshape, Cast, Concat, ...               ├──> ids of each sparse parameter
                  └────────────────────────────────────────────┘

Batch after batch and replica by replica, as training would be fed. Where ids depend on a variable or on
random draws, or where their nodes do not run on a replica's share, nothing is measured: the parameter
keeps the assumption that all rows are drawn alike.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from partc.compiler.model_files.open_model import FATAL, open_model
from partc.compiler.options import Sample
from partc.cost.assignment.row_spread import spread_of
from partc.cost.sparsity import SPARSITY_FORMAT, Sparsity, TouchedRows
from partc.cost.strategy import Batch
from partc.passes.graph.reachability import ancestors
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.data.feeds import Source, open_source
from partc.runtime.errors import BadUsage
from partc.runtime.plan.plan_folder import sha256_of_file
from partc.runtime.plan.program import PLAN_FORMAT, Plan

Array = np.ndarray[Any, np.dtype[Any]]

_DOES_NOT_RUN = (
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


@dataclass(frozen=True, slots=True)
class _IdGraph:
    """What computes one parameter's ids from data inputs."""

    session: ort.InferenceSession
    feeds: tuple[str, ...]

    def ids(self, share: Mapping[str, Array]) -> Array:
        """Return the ids int64[n] that a replica reads."""
        (ids,) = self.session.run(None, {name: share[name] for name in self.feeds})
        return np.asarray(ids).reshape(-1)


def measure_sparsity(
    training: TrainingGraph,
    sample: Sample,
    sizes: Mapping[str, int],
    batch: Batch,
    replicas_together: Collection[int],
) -> Sparsity:
    """Count the distinct ids of one replica, and of so many `replicas_together`; the greatest is all.

    `training`: gradients known, and not yet changed for a strategy. Raises BadData, BadUsage.
    """
    if sample.steps < 1:
        raise BadUsage(f"{sample.steps} steps", at="--sample-steps", fix="sample at least one step")
    together = sorted({1, *replicas_together})
    source = open_source(sample.data, _plan_of_data(training, sizes, batch, together[-1]))
    graphs = _id_graphs(training)
    shares = [_shares(training, source, step, together[-1]) for step in range(sample.steps)]
    measured = {name: _touched_rows(training, name, graphs[name], shares, together) for name in graphs}
    path = Path(sample.data)
    is_file = sample.data.endswith(".npz")
    return Sparsity(
        SPARSITY_FORMAT,
        path.name if is_file else sample.data,
        sha256_of_file(path) if is_file else None,
        sample.steps,
        {name: rows for name, rows in measured.items() if rows is not None},
    )


# ---------------------------------------------------------------- data


def _plan_of_data(training: TrainingGraph, sizes: Mapping[str, int], batch: Batch, replicas: int) -> Plan:
    """Return a plan of nothing but its data, which is all that a source asks for."""
    return Plan(
        format=PLAN_FORMAT,
        model="",
        batch=batch,
        replicas=replicas,
        sizes=dict(sizes),
        loss=training.loss,
        ranks=(),
        groups={},
        instructions=(),
        buffers=(),
        slices=(),
        variables=(),
        data_inputs=tuple(training.data_inputs.values()),
        outputs=(),
        predicted_step_s=0.0,
        cost_cache_sha256="",
        files={},
    )


def _shares(training: TrainingGraph, source: Source, step: int, replicas: int) -> list[dict[str, Array]]:
    """Return what each replica is fed."""
    total = source.total(step)
    shares: list[dict[str, Array]] = [{} for _ in range(replicas)]
    for name, data_input in training.data_inputs.items():
        axis = data_input.sample_axis
        whole = total[name]
        parts = [whole] * replicas if axis is None else np.split(whole, replicas, axis)
        for share, part in zip(shares, parts, strict=True):
            share[name] = np.ascontiguousarray(part).reshape(part.shape)
    return shares


# ---------------------------------------------------------------- from data to ids


def _id_graphs(training: TrainingGraph) -> dict[str, _IdGraph]:
    """Return the graphs of those sparse parameters whose ids follow from data alone."""
    graphs: dict[str, _IdGraph] = {}
    for name, gradient in training.gradients.items():
        if gradient.ids is not None and (graph := _id_graph(training, gradient.ids)) is not None:
            graphs[name] = graph
    return graphs


def _id_graph(training: TrainingGraph, ids: str) -> _IdGraph | None:
    before = ancestors(training.graph, [ids])
    nodes = [node for node in training.graph.nodes if {out.name for out in node.outputs} & before]
    if before & (training.drawn_inputs.keys() | training.variables.keys()):
        return None
    feeds = tuple(name for name in training.data_inputs if name in before)
    try:
        session = _session(training, nodes, feeds, ids)
    except _DOES_NOT_RUN:
        return None
    return _IdGraph(session, feeds)


def _session(
    training: TrainingGraph, nodes: list[gs.Node], feeds: Sequence[str], ids: str
) -> ort.InferenceSession:
    tensors = training.graph.tensors()
    inputs = [tensors[name] for name in feeds]
    graph = gs.Graph(nodes, inputs, [tensors[ids]], opset=training.opset)
    model: onnx.ModelProto = gs.export_onnx(graph)
    model.ir_version = 10
    model.functions.extend(training.functions)
    model.opset_import.extend(
        onnx.helper.make_opsetid(domain, 1) for domain in sorted({f.domain for f in training.functions})
    )
    # A replica's share may be smaller than the graph's own batch.
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    return open_model(model, severity=FATAL)


# ---------------------------------------------------------------- counting


def _touched_rows(
    training: TrainingGraph,
    name: str,
    graph: _IdGraph,
    shares: Sequence[Sequence[Mapping[str, Array]]],
    together: Sequence[int],
) -> TouchedRows | None:
    rows = training.variables[name].shape[0]
    try:
        ids = [[np.where(i < 0, i + rows, i) for i in map(graph.ids, step)] for step in shares]
    except _DOES_NOT_RUN:
        return None
    mean_ids = float(np.mean([len(of_replica) for step in ids for of_replica in step]))
    unique = [[np.unique(of_replica) for of_replica in step] for step in ids]
    groups = {k: [group for step in unique for group in _distinct(step, k)] for k in together}
    distinct = tuple((k, round(float(np.mean(list(map(len, groups[k])))), 6)) for k in together)
    of_host = groups[together[max(0, len(together) - 2)]]  # the last is all replicas'
    return TouchedRows(
        rows, round(mean_ids, 6), distinct, spread_of(np.bincount(np.concatenate(of_host), minlength=rows))
    )


def _distinct(ids: Sequence[Array], together: int) -> list[Array]:
    """Return the distinct ids of every so many neighbouring replicas."""
    groups = [ids[i : i + together] for i in range(0, len(ids) - together + 1, together)]
    return [np.unique(np.concatenate(group)) for group in groups]
