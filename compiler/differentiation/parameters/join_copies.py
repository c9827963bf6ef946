"""Train a parameter once that an exporter stored several times: compute the copies from one tensor.

    w        w, and another initializer with w.reshape(8, 2), w[0], w.T     views of w
    (gone)   w[None] and w.T                                                the one is a view of the other
    (gone)   w[:3] and w[3:]                                                no common element: they stay
    (gone)   w[:3] and w[1:]                                                the user is asked

torch.onnx.export(dynamo=True) tells from which parameters it folded a tensor; which view it is, values tell
(views.py). Where they do not, tensors that may share elements are marked: training each would untie them.
TorchScript's exporter tells nothing: values that mostly differ have to do, beside a parameter by name. Folded
tensors that are views of each other are asked for: layers may be copies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path

import numpy as np
import onnx

from partc.compiler.differentiation.forward.expand_ops import names_in
from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.compiler.differentiation.parameters.exporter_facts import (
    FOLDED_BY_TORCHSCRIPT,
    ExporterFacts,
    mark_undecided,
)
from partc.compiler.differentiation.parameters.folded import SHARED, is_rearranged, operations_of
from partc.compiler.differentiation.parameters.value_patterns import bits_of, values_of
from partc.compiler.differentiation.parameters.views import PERMUTING, View, find_view
from partc.compiler.differentiation.tensor_types import FLOATS, element_count

COINCIDENCES = 1 << 14  # pairs of values, of which none is equal by chance
RUN_BITS = 128  # of neighbours that are equal by chance in no two tensors
MIN_TOLD = 4  # elements by which values alone tell a view


def join_copies(graph: onnx.GraphProto, facts: ExporterFacts, folder: Path | None) -> dict[str, str]:
    """Compute copies in place of storing them: copy -> what it is computed from.

    What is left of a parameter's copies and may share elements is marked as undecided.
    """
    stored = _Stored(graph, facts, folder)
    views = _torchscript_views(stored) if facts.is_silent else {}
    for parameter, names in stored.families.items():
        bases, joined = _join(stored, parameter, names)
        views |= joined
        for name in _untied(stored, parameter, bases):
            mark_undecided(graph, name, SHARED)
    build = NodeBuilder(names_in(graph))
    nodes: list[onnx.NodeProto] = []
    for copy, (base, view) in views.items():
        made, constants = view.nodes(base, copy, build.fresh)
        nodes += made
        graph.initializer.remove(stored.tensors[copy])
        graph.initializer.extend(constants)
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])
    return {copy: base for copy, (base, _) in views.items()}


@dataclass
class _Stored:
    """The float initializers of a graph."""

    graph: onnx.GraphProto
    facts: ExporterFacts
    folder: Path | None
    tensors: dict[str, onnx.TensorProto] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = {t.name: t for t in self.graph.initializer if t.data_type in FLOATS}
        self.bits = cache(self._bits)

    @cached_property
    def families(self) -> dict[str, list[str]]:
        """Return the tensors that hold something of a parameter, where several do."""
        families: dict[str, list[str]] = {}
        for name in self.tensors:
            for parameter in self.parameters_of(name):
                families.setdefault(parameter, []).append(name)
        return {parameter: names for parameter, names in families.items() if len(names) > 1}

    def parameters_of(self, name: str) -> tuple[str, ...]:
        """Return the parameters that a tensor is, or was folded from."""
        if self.facts.kinds.get(name) == "PARAMETER":
            return (name,)
        return self.facts.parameters_in(self.facts.folded_from.get(name, ()))

    def is_rearranged(self, name: str) -> bool:
        """Tell whether a tensor holds elements of parameters, rather than what is computed from them."""
        parameters = self.parameters_of(name)
        return name in parameters or is_rearranged(self.facts, self.tensors[name], parameters, self.folder)

    def view(self, base: str, copy: str) -> View | None:
        """Return how one tensor is a view of another, None where that is not sure."""
        source, values = self.bits(base), self.bits(copy)
        if self.tensors[base].data_type != self.tensors[copy].data_type or source is None or values is None:
            return None
        # A base that was folded itself may be rearranged: what the names tell is then told of another.
        is_whole = self.facts.kinds.get(base) == "PARAMETER"
        return find_view(source, values, operations_of(self.facts, copy) if is_whole else frozenset())

    def _bits(self, name: str) -> np.ndarray | None:
        return bits_of(self.tensors[name], self.folder)


_Views = dict[str, tuple[str, View]]  # copy -> what it is a view of, and which


def _join(stored: _Stored, parameter: str, names: Sequence[str]) -> tuple[list[str], _Views]:
    """Return which tensors of a parameter stay, and the views that the others are."""

    def rank(name: str) -> tuple[bool, int, bool, int]:
        dims = stored.tensors[name].dims
        is_permuted = not PERMUTING.isdisjoint(operations_of(stored.facts, name))
        return (name != parameter, -element_count(dims), is_permuted, len(dims))

    bases: list[str] = []
    views: _Views = {}
    for name in sorted(filter(stored.is_rearranged, names), key=rank):
        is_alone = len(stored.parameters_of(name)) == 1
        passes_gradients = "detach" not in operations_of(stored.facts, name)
        for base in bases if is_alone and passes_gradients else ():
            view = stored.view(base, name)
            if view is not None:
                views[name] = (base, view)
                break
        else:
            bases.append(name)
    return bases, views


def _untied(stored: _Stored, parameter: str, bases: Sequence[str]) -> set[str]:
    """Return those of a parameter's tensors that may share elements with others."""
    if parameter in bases:
        return set(bases) - {parameter}
    return {name for pair in combinations(bases, 2) if _may_overlap(stored, *pair) for name in pair}


# ---------------------------------------------------------------- common elements


def _may_overlap(stored: _Stored, one: str, other: str) -> bool:
    """Tell whether two tensors may hold the same element of a parameter: it would have the same value.

    Of large ones some values are equal by chance: there neighbours have to be, along some axis.
    """
    values, others = stored.bits(one), stored.bits(other)
    if values is None or others is None or stored.tensors[one].data_type != stored.tensors[other].data_type:
        return True
    if not np.intersect1d(values, others).size:
        return False
    if values.size * others.size <= COINCIDENCES:
        return True
    runs, other_runs = _runs(values), _runs(others)
    return not runs.size or not other_runs.size or bool(np.intersect1d(runs, other_runs).size)


def _runs(values: np.ndarray) -> np.ndarray:
    """Return a number for each run of neighbours along each axis that is long enough."""
    length = RUN_BITS // (8 * values.itemsize)
    factors = np.random.default_rng(0).integers(1, 1 << 62, length, np.uint64) | np.uint64(1)
    numbers = []
    for axis, size in enumerate(values.shape):
        if size >= length:
            windows = np.lib.stride_tricks.sliding_window_view(values, length, axis)
            numbers.append(sum(windows[..., i] * factor for i, factor in enumerate(factors)))
    return np.concatenate([np.ravel(array) for array in numbers]) if numbers else np.zeros(0, np.uint64)


# ---------------------------------------------------------------- TorchScript


def _torchscript_views(stored: _Stored) -> _Views:
    """Return the folded tensors that are views of one named parameter; mark those of several, or each other.

    Layers that are copies of one have equal parameters: whose view it is nothing tells.
    """
    told = [name for name in stored.tensors if _is_told_by_values(stored, name)]
    views: _Views = {}
    for name, sources in _holding_first_values(stored, told).items():
        found = [
            (source, view)
            for source in sources
            if not _are_equal(stored, source, name) and (view := stored.view(source, name)) is not None
        ]
        named = [each for each in found if not each[0].startswith(FOLDED_BY_TORCHSCRIPT)]
        if len(named) == 1:
            views[name] = named[0]
        elif found:
            for one in (name, *(source for source, _ in found if source not in dict(named))):
                mark_undecided(stored.graph, one, SHARED)
    return views


def _are_equal(stored: _Stored, one: str, other: str) -> bool:
    """Tell whether tensors are equal as they are: layers that were copied are, and train apart."""
    values, others = stored.bits(one), stored.bits(other)
    return values is not None and others is not None and np.array_equal(values, others)


def _is_told_by_values(stored: _Stored, name: str) -> bool:
    tensor = stored.tensors[name]
    if not name.startswith(FOLDED_BY_TORCHSCRIPT) or element_count(tensor.dims) < MIN_TOLD:
        return False
    values = values_of(tensor, stored.folder)
    return stored.bits(name) is not None and values.are_distinct and not values.is_progression


def _holding_first_values(stored: _Stored, names: Sequence[str]) -> Mapping[str, list[str]]:
    """Return the tensors that hold each one's first value, named ones first: few are to be searched."""
    holding: dict[str, list[str]] = {name: [] for name in names}
    firsts = {name: bits.flat[0] for name in names if (bits := stored.bits(name)) is not None}
    for source in sorted(stored.tensors, key=lambda name: name.startswith(FOLDED_BY_TORCHSCRIPT)):
        values = stored.bits(source) if firsts else None
        if values is None:
            continue
        present = set(np.unique(values[np.isin(values, list(firsts.values()))]).tolist())
        for name, first in firsts.items():
            if int(first) in present and source != name:
                holding[name].append(source)
    return holding
