"""The oracle: hold every intermediate tensor of all ranks against the single device's.

    plan  ── every node an output ──> pieces of all ranks ── layout ──> whole ┐
                                                                              ├─ first wrong node
    graph ── every tensor an output, one device ──────────────────────> whole ┘

Pieces are put together as their layout says: concatenated (split, owned), combined (partial), or
found equal (whole). Under the per-replica reading a replica's own tensor is held against the graph
run on its samples alone, and what lies behind the averages against the graph with the averages given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort
from onnx import helper

from partc.compiler.model_files.cut_model import cut_model, leaves_of, reads_of
from partc.passes.graph.training_graph import Gradient, TrainingGraph
from partc.passes.indexed_rows.indexed_slices import SUM_ROWS
from partc.passes.layouts.layouts import (
    REPLICAS,
    WORKER,
    Layout,
    Overlapping,
    OwnRows,
    Partial,
    PerReplica,
    Replicate,
    Split,
    Widened,
)
from partc.passes.layouts.meshes import Mesh
from partc.passes.lowering.overlap import fill_value
from partc.passes.replicas.average_replicas import AVERAGE, REPLICA_DOMAIN, STACK
from partc.runtime.data.batches import share_of
from partc.runtime.data.initial import InitialValues
from partc.runtime.execution.device import INEXACT_IN_DOUBLE, UNSOUND, WRONG_OF_VECTORS
from partc.runtime.plan.boxes import part_range
from partc.runtime.plan.program import IDLE, Plan
from tests.builders.plans.compiled_steps import Batch, Compiled
from tests.checks.opened_plan import run_opened

# What was inserted where replicas are averaged: tensor -> (op, what it averages or stacks)
Inserted = Mapping[str, tuple[str, str]]

COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True)
class Wrong:
    """A tensor whose pieces do not make what the single device has."""

    node: str
    op: str
    tensor: str
    layout: Layout
    why: str


class Oracle:
    """Knows every tensor of the single device. Make it before compiling, which changes the graph."""

    def __init__(self, training: TrainingGraph) -> None:
        self._model = gs.export_onnx(training.graph)
        self._model.ir_version = 10
        del self._model.functions[:]
        self._model.functions.extend(training.functions)
        known = {entry.domain for entry in self._model.opset_import}
        for domain in {function.domain for function in training.functions} - known:
            self._model.opset_import.append(helper.make_opsetid(domain, 1))
        self._gradients = dict(training.gradients)
        self._makers = {
            name: (node.name, node.op_type) for node in self._model.graph.node for name in node.output
        }
        self._order = list(self._makers)

    def first_wrong(self, compiled: Compiled, batch: Batch, rtol: float = 1e-9) -> Wrong | None:
        """Run one step everywhere; return the first node, in the graph's order, whose result differs."""
        pieces = self.pieces = run_opened(compiled.folder, batch)
        reference = self._reference(compiled, batch)
        meanings = compiled.compilation.lowered.meanings
        inserted = _inserted(compiled.compilation.training)
        found: list[tuple[int, Wrong]] = []
        self.compared = 0
        for value, (tensor, layout) in meanings.items():
            _, root = inserted.get(tensor, ("", tensor))
            of_site = [
                {r: a for r, a in of_microbatch.items() if layout.site in _sites(compiled.plan, r)}
                for of_microbatch in _of_microbatches(pieces, value, layout, compiled)
            ]
            at_site = of_site[0] if of_site else {}
            if not at_site or root not in self._makers:
                continue
            self.compared += 1
            expected = reference(tensor, layout)
            mesh = compiled.compilation.lowered.meshes.of(layout.site)
            order = _mesh_order(at_site, mesh, compiled.plan)
            touched = [reference.only_touched(of_microbatch, expected) for of_microbatch in of_site]
            parts = [of_microbatch[rank] for rank in order for of_microbatch in touched]
            keepers = {
                axis: reference.keepers(own, mesh.size(axis))
                for axis, own in enumerate(layout.placements)
                if isinstance(own, OwnRows)
            }
            why = _difference(parts, layout, mesh, len(of_site) > 1, expected, rtol, keepers)
            if why is not None:
                node, op = self._makers[root]
                found.append((self._order.index(root), Wrong(node, op, tensor, layout, why)))
        return min(found, key=lambda entry: entry[0])[1] if found else None

    def _reference(self, compiled: Compiled, batch: Batch) -> "_Reference":
        values = InitialValues(compiled.folder)
        start = {variable.name: values.part(variable.name) for variable in compiled.plan.variables}
        inserted = _inserted(compiled.compilation.training)
        return _Reference(self._model, self._gradients, compiled.plan, inserted, start, batch)


def _inserted(training: TrainingGraph) -> Inserted:
    return {
        node.outputs[0].name: (node.op, node.inputs[0].name)
        for node in training.graph.nodes
        if node.domain == REPLICA_DOMAIN and node.op in (AVERAGE, STACK)
    }


# ---------------------------------------------------------------- the single device


class _Reference:
    """The single device's tensors: one run on the whole batch, or one per replica and one behind."""

    def __init__(
        self,
        model: onnx.ModelProto,
        gradients: Mapping[str, Gradient],
        plan: Plan,
        inserted: Inserted,
        start: Mapping[str, np.ndarray],
        batch: Batch,
    ) -> None:
        self._inserted = inserted
        everything = [name for node in model.graph.node for name in node.output if name]
        self._graph = model.graph
        self._behind: Batch = {}
        if plan.batch == "global":
            self._runs = [_run(model, everything, {**start, **batch})]
        else:
            self._run_per_replica(everything, model, gradients, plan, start, batch)
        tensors = self._runs[0] | self._behind
        rows_of = {g.rows: len(start[g.parameter]) for g in gradients.values() if g.rows is not None}
        self._touched = [
            (rows_of[node.input[1]], tensors[node.output[0]])
            for node in model.graph.node
            if node.op_type == SUM_ROWS and node.input[1] in rows_of
        ]

    def _run_per_replica(
        self,
        everything: list[str],
        model: onnx.ModelProto,
        gradients: Mapping[str, Gradient],
        plan: Plan,
        start: Mapping[str, np.ndarray],
        batch: Batch,
    ) -> None:
        self._samples = {entry.name for entry in plan.data_inputs if entry.sample_axis is not None}
        shares = {
            rank.replica: share_of(plan, rank, batch)
            for rank in plan.ranks
            if rank.replica is not None and IDLE not in rank.sites
        }
        in_order = [shares[replica] for replica in sorted(shares)]
        self._runs = [share | _run(model, everything, {**start, **share}) for share in in_order]
        met = self._meet(gradients)
        behind = self._behind_averages(met)
        rest = [name for name in everything if name in behind]
        types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in met.items()}
        self._behind = _run(cut_model(model, types, rest), rest, {**start, **batch, **met})

    def _behind_averages(self, met: Batch) -> set[str]:
        """Return the tensors that are computed from what replicas have averaged, and from no sample."""
        of_samples, behind = set(self._samples), set(met)
        for node in self._graph.node:
            reads = reads_of(node)
            made = {name for name in node.output if name not in met}
            if reads & of_samples:
                of_samples |= made
            elif reads & behind:
                behind |= made
        return behind - met.keys()

    def _meet(self, gradients: Mapping[str, Gradient]) -> Batch:
        met: Batch = {}
        for gradient in gradients.values():
            if gradient.ids is None or gradient.rows is None:
                assert gradient.dense is not None
                met[gradient.dense] = self._average(gradient.dense)
                continue
            pairs = zip(self._parts(gradient.ids), self._parts(gradient.rows), strict=True)
            for ids, rows in pairs:
                if leaves_of(self._graph, [ids], ()) & self._samples:
                    met |= {ids: self._stack(ids), rows: self._stack(rows)}
                else:
                    met[rows] = self._average(rows)
        return met

    def _parts(self, tensor: str) -> list[str]:
        """Return what a gradient's ids or rows are joined from: each part meets on its own."""
        maker = next((node for node in self._graph.node if tensor in node.output), None)
        return list(maker.input) if maker is not None and maker.op_type == "Concat" else [tensor]

    def __call__(self, tensor: str, layout: Layout) -> list[np.ndarray]:
        """Return the tensor; one per replica for what replicas have of their own."""
        if isinstance(layout.along(REPLICAS), PerReplica):
            return [run[tensor] for run in self._runs]
        op, source = self._inserted.get(tensor, ("", tensor))
        if op == AVERAGE:
            return [self._average(source)]
        if op == STACK:
            return [self._stack(source)]
        return [self._behind[tensor] if tensor in self._behind else self._runs[0][tensor]]

    def keepers(self, own: OwnRows, ranks: int) -> np.ndarray:
        """Return, for each row that ranks look up of a table, which of them keeps it."""
        ends = [part_range(own.rows, ranks, rank)[1] for rank in range(ranks)]
        (ids,) = self(own.ids, Layout(WORKER))
        return np.searchsorted(ends, ids % own.rows, side="right")

    def only_touched(
        self, pieces: Mapping[int, np.ndarray], expected: list[np.ndarray]
    ) -> Mapping[int, np.ndarray]:
        """Pick the touched rows out of slices that were all-reduced: they have a row for every id."""
        wanted = len(expected[0]) if expected[0].ndim else 0
        for rows, ids in self._touched:
            if len(ids) == wanted != rows and all(a.ndim and len(a) == rows for a in pieces.values()):
                return {rank: array[ids] for rank, array in pieces.items()}
        return pieces

    def _average(self, tensor: str) -> np.ndarray:
        return np.asarray(np.mean([run[tensor] for run in self._runs], axis=0))

    def _stack(self, tensor: str) -> np.ndarray:
        whole = np.concatenate([run[tensor] for run in self._runs])
        return whole if whole.dtype.kind == "i" else whole / len(self._runs)


def _run(model: onnx.ModelProto, outputs: list[str], feeds: Mapping[str, np.ndarray]) -> Batch:
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    del opened.graph.output[:]
    opened.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        opened.SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=[*UNSOUND, *WRONG_OF_VECTORS, *INEXACT_IN_DOUBLE],
    )
    read = {info.name: feeds[info.name] for info in session.get_inputs()}
    return dict(zip(outputs, session.run(outputs, read), strict=True))


# ---------------------------------------------------------------- putting together


Pieces = Mapping[str, Mapping[int, np.ndarray]]  # value -> rank -> its piece


def _of_microbatches(
    pieces: Pieces, value: str, layout: Layout, compiled: Compiled
) -> list[Mapping[int, np.ndarray]]:
    """Return what ranks have of a value: once, or of every micro-batch where these differ."""
    axis, count = compiled.compilation.lowered.meshes.microbatch_axis, compiled.plan.microbatches
    names = (f"{value}#{number}" for number in range(count))
    found = [pieces[name] for name in names if name in pieces]
    if not found and value in pieces:
        found = [pieces[value]]
    if axis is None or isinstance(layout.along(axis), Replicate):
        return found[-1:]  # of a sum, the last
    return found * count if len(found) == 1 else found  # parts of what is alike everywhere are made once


def _mesh_order(pieces: Mapping[int, np.ndarray], mesh: Mesh, plan: Plan) -> list[int]:
    """Return the ranks in the order of their places in the mesh."""
    workers = [rank.rank for rank in plan.ranks if rank.replica is not None]
    places = {workers[worker]: place for place, worker in enumerate(mesh.workers)}
    return sorted(pieces, key=lambda rank: (places.get(rank, 0), rank))


def _difference(
    parts: list[np.ndarray],
    layout: Layout,
    mesh: Mesh,
    is_repeated: bool,
    expected: list[np.ndarray],
    rtol: float,
    keepers: Mapping[int, np.ndarray],
) -> str | None:
    """Say how the pieces, in mesh order, differ from what they should make; None if they do not.

    `keepers`: by mesh axis, the rank whose row is right.
    """
    if layout.site == "server":
        mesh = Mesh("server", (("owner", len(parts)),))
    for axis in reversed(range(len(mesh.axes if is_repeated else mesh.grid))):
        size = mesh.size(axis)
        groups = [parts[start : start + size] for start in range(0, len(parts), size)]
        before = [mesh.size(other) for other in range(axis)]
        places = [[int(place) for place in np.unravel_index(n, before)] for n in range(prod(before))]
        places += [[0] * axis] * len(groups)  # copies that differ are all kept, and found wrong
        parts = [
            made
            for group, place in zip(groups, places, strict=False)
            for made in (
                [np.stack([group[rank][row] for row, rank in enumerate(keepers[axis])])]
                if axis in keepers
                else _combine(group, layout, mesh, axis, place)
            )
        ]
    expected = [_without_unread(whole, layout) for whole in expected]
    one_each = expected if len(expected) == len(parts) else expected * len(parts)
    for actual, wanted in zip(parts, one_each, strict=True):
        if actual.shape != wanted.shape:
            return f"shape {list(actual.shape)} instead of {list(wanted.shape)}"
        limit = rtol * max(1.0, float(np.max(np.abs(wanted), initial=0.0)))
        if not np.allclose(actual, wanted, rtol=rtol, atol=limit, equal_nan=True):
            return f"off by {np.max(np.abs(actual.astype(float) - wanted.astype(float))):.3g}"
    return None


def _combine(
    group: list[np.ndarray], layout: Layout, mesh: Mesh, axis: int, place: Sequence[int]
) -> list[np.ndarray]:
    """Put together what the ranks along a mesh axis have, which are at one place along those before it.

    Copies are all kept, to be compared.
    """
    placement = layout.along(axis)
    if isinstance(placement, Split) and placement.rows_of:
        return [np.concatenate(group)]
    if isinstance(placement, Split):
        blocks = placement.outer
        splits = [(other, split) for other, split in layout.splits() if split.axis == placement.axis]
        for outer in {split.outer for _, split in splits if split.outer < placement.outer}:
            here = [(other, split.uneven) for other, split in splits if split.outer == outer]
            entries = max(uneven for _, uneven in here) or prod(mesh.size(other) for other, _ in here)
            own = np.arange(entries)
            for other in (other for other, _ in here if other < axis):
                own = np.array_split(own, mesh.size(other))[place[other]]
            blocks = blocks // entries * len(own)
        return [_join(group, Split(placement.axis, blocks))]
    if isinstance(placement, Widened):
        return _narrow(group, placement)
    if isinstance(placement, Overlapping):
        return _merge(group, placement)
    if isinstance(placement, Partial):
        return [reduce(COMBINE[placement.reduction], group)]
    are_copies = axis > 0 and all(np.array_equal(copy, group[0], equal_nan=True) for copy in group)
    return group[:1] if are_copies else group


def _narrow(parts: list[np.ndarray], widened: Widened) -> list[np.ndarray]:
    """Join the parts without what is their neighbours'; where that differs from theirs, nothing fits."""
    axis, before = widened.axis, widened.before
    own = parts[0].shape[axis] - before - widened.after
    whole = np.concatenate([part.take(range(before, before + own), axis) for part in parts], axis)
    around = [(before, widened.after) if a == axis else (0, 0) for a in range(whole.ndim)]
    fill = fill_value(widened.fill, whole.dtype)
    padded = np.pad(whole, around, constant_values=fill)
    wide = range(parts[0].shape[axis])
    fits = [np.array_equal(p, padded.take([r * own + i for i in wide], axis)) for r, p in enumerate(parts)]
    return [whole] if all(fits) else parts


def _merge(parts: list[np.ndarray], overlapping: Overlapping) -> list[np.ndarray]:
    """Put together parts that overlap; where they differ from each other, or in what pads them, nothing fits.

    What nobody reads is left zero.
    """
    axis, size = overlapping.axis, overlapping.size
    shape = [size if a == axis else length for a, length in enumerate(parts[0].shape)]
    whole, fill = np.zeros(shape, parts[0].dtype), fill_value(overlapping.fill, parts[0].dtype)
    fits: list[bool] = []
    for _ in range(2):  # the second time all are there
        fits.clear()
        for part, (start, _stop) in zip(parts, overlapping.ranges, strict=True):
            for place in range(part.shape[axis]):
                entry, at = part.take(place, axis), start + place
                if 0 <= at < size:
                    target = whole[(slice(None),) * axis + (at,)]
                    fits.append(np.array_equal(entry, target, equal_nan=True))
                    target[...] = entry
                else:
                    fits.append(bool(np.all(entry == fill)))
    lengths = [stop - start for start, stop in overlapping.ranges]
    are_long = [part.shape[axis] for part in parts] == lengths
    return [whole] if are_long and all(fits) else parts


def _without_unread(whole: np.ndarray, layout: Layout) -> np.ndarray:
    """Return a tensor with zeros where parts that overlap leave entries out."""
    for _, overlapping in layout.overlapping():
        read = {entry for entries in overlapping.ranges for entry in range(*entries)}
        unread = sorted(set(range(overlapping.size)) - read)
        if unread:
            whole = whole.copy()
            whole[(slice(None),) * overlapping.axis + (unread,)] = 0
    return whole


def _join(parts: list[np.ndarray], split: Split) -> np.ndarray:
    """Undo a split: rank r has the r-th part of the factor that `outer` blocks stand before."""
    axis = split.axis
    apart = [p.reshape(*p.shape[:axis], split.outer, -1, *p.shape[axis + 1 :]) for p in parts]
    joined = np.concatenate(apart, axis=axis + 1)
    return joined.reshape(*parts[0].shape[:axis], -1, *parts[0].shape[axis + 1 :])


def _sites(plan: Plan, rank: int) -> tuple[str, ...]:
    return plan.ranks[rank].sites
