"""What partc sees in a training graph: variables, gradients, inputs, and the parts of a step."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from partc.compiler.planning.choose_reading import are_of_outputs
from partc.compiler.report.describe_assumptions import measured_sentence
from partc.compiler.report.units import plural, size
from partc.cost.sparsity import Sparsity
from partc.passes.graph.facts import Facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.roles.find_roles import Role, Roles, find_roles
from partc.passes.search.operators.find_groups import OperatorGroup, find_groups
from partc.runtime.plan.variables import DataInput


@dataclass(frozen=True, slots=True)
class InspectedVariable:
    """One variable."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    role: Role
    parameter: str | None  # that a slot belongs to
    gradient: str  # "dense dW", "sparse (ids, rows)", "unfound (why)" or ""


@dataclass(frozen=True, slots=True)
class InspectedPart:
    """One part of the step; `flops` None where nothing is known."""

    name: str
    nodes: int
    flops: int | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that `partc inspect` shows."""

    variables: tuple[InspectedVariable, ...]
    data_inputs: tuple[DataInput, ...]
    unread_inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    loss: str | None
    parts: tuple[InspectedPart, ...]
    departures: tuple[str, ...] = ()  # of a batch per replica from one device
    touched: tuple[str, ...] = ()  # a sentence per table: the rows that a step touches
    groups: tuple[OperatorGroup, ...] = ()
    refusal: str = ""  # why no reading of the batch is compiled for CPUs

    def render(self) -> Group:
        """Return tables for a terminal."""
        notes = [Text(note) for note in self._notes()]
        total = sum(variable.nbytes for variable in self.variables)
        outputs_line = f"outputs: {', '.join(self.outputs) or 'none'}; loss: {self.loss or 'unknown'}"
        sum_line = f"{plural(len(self.variables), 'variable')}, {size(total)}"
        return Group(
            self._variable_table(),
            sum_line,
            "",
            self._input_table(),
            outputs_line,
            "",
            self._part_table(),
            *self.touched,
            *notes,
        )

    def render_groups(self) -> str:
        """Return the operator groups as lines to copy from, which no terminal may fold or cut."""
        lines = [
            f"{len(self.groups)} operator groups: name, op, output, [variables], and below what each may "
            "split, into how many parts at most"
        ]
        for group in self.groups:
            shape = " x ".join(map(str, group.shape)) or "scalar"
            reads = f"  [{', '.join(group.reads)}]" if group.reads else ""
            light = f"  + {group.light} light ops" if group.light else ""
            splits = "  ".join(f'"{dimension}": {parts}' for dimension, parts in group.splits.items())
            lines += [f"{group.node}  {group.op}  {shape}{reads}{light}", f"    {splits or 'runs whole'}"]
        return "\n".join(lines)

    def _notes(self) -> tuple[str, ...]:
        """Say how replicas on batches of their own would depart from one device, or why none is compiled."""
        if self.refusal:
            return (f"partc compile refuses this step where a rank is on a CPU: {self.refusal}",)
        proven = "Replicas on batches of their own train what one device trains on all of them: proven."
        if not self.departures:
            return (proven,)
        if are_of_outputs(self.departures):
            opening = "What they return is of each replica's own batch:"
            return (proven, opening, *(f"  {line}" for line in self.departures))
        opening = "Replicas on batches of their own would not make what one device makes of all of them:"
        return (opening, *(f"  {line}" for line in self.departures), "Only --batch global is exact.")

    def _variable_table(self) -> Table:
        table = Table(title="variables")
        table.add_column("variable", overflow="fold")
        table.add_column("role", overflow="fold")
        for heading in ("type", "shape", "size", "gradient"):
            table.add_column(heading, no_wrap=True)
        for entry in self._parameters_first():
            role = f"slot of {entry.parameter}" if entry.parameter else entry.role
            shape = " x ".join(map(str, entry.shape)) or "scalar"
            kind, _, _ = entry.gradient.partition(" ")
            table.add_row(entry.name, role, entry.dtype, shape, size(entry.nbytes), kind)
        return table

    def _parameters_first(self) -> list[InspectedVariable]:
        """Return the variables, slots behind their parameter."""
        place = {entry.name: index for index, entry in enumerate(self.variables)}
        return sorted(
            self.variables,
            key=lambda e: (place[e.parameter or e.name], e.parameter is not None, place[e.name]),
        )

    def _input_table(self) -> Table:
        table = Table("data input", "type", "shape", "sample axis", "values", title="data inputs")
        for entry in self.data_inputs:
            shape = " x ".join(map(str, entry.shape)) or "scalar"
            axis = "none: the same for all" if entry.sample_axis is None else str(entry.sample_axis)
            table.add_row(
                entry.name, entry.dtype, shape, axis, f"0 to {entry.high - 1}" if entry.high else ""
            )
        for name in self.unread_inputs:
            table.add_row(name, "", "", "not read", "")
        return table

    def _part_table(self) -> Table:
        table = Table("part", "nodes", "FLOPs", title="one step")
        for part in self.parts:
            table.add_row(part.name, str(part.nodes), "" if part.flops is None else f"{part.flops:,}")
        return table


def inspect_graph(
    training: TrainingGraph,
    flops: Mapping[str, int] | None = None,
    sparsity: Sparsity | None = None,
    departures: tuple[str, ...] = (),
    facts: Facts | None = None,
    refusal: str = "",
) -> Inspection:
    """Look at a training graph whose gradients are known.

    `flops` by node name, if counted; `sparsity`, if it was measured; `departures` of replicas on batches of
    their own, as choose_reading.py describes them; `facts`, for the operator groups; `refusal`, why it is not
    compiled for CPUs, whatever the batch.
    """
    roles = find_roles(training)
    return Inspection(
        variables=_variables(training, roles),
        data_inputs=tuple(training.data_inputs.values()),
        unread_inputs=training.unread_inputs,
        outputs=training.outputs,
        loss=training.loss,
        parts=(
            _part("main computation", roles.main, flops),
            _part("post-aggregation", roles.post_aggregation, flops),
            _part("updates", roles.updates, flops),
        ),
        departures=departures,
        touched=_touched_rows_lines(training, sparsity),
        groups=() if facts is None else find_groups(training, facts, roles.main),
        refusal=refusal,
    )


def _variables(training: TrainingGraph, roles: Roles) -> tuple[InspectedVariable, ...]:
    return tuple(
        InspectedVariable(
            name,
            variable.dtype.name,
            variable.shape,
            int(np.prod(variable.shape, dtype=np.int64)) * variable.dtype.itemsize,
            roles.variables[name].role,
            roles.variables[name].parameter,
            _spell(training, name),
        )
        for name, variable in training.variables.items()
    )


def _spell(training: TrainingGraph, variable: str) -> str:
    gradient = training.gradients.get(variable)
    if gradient is None:
        why = training.unfound_gradients.get(variable)
        return f"unfound ({why})" if why else ""
    return f"sparse ({gradient.ids}, {gradient.rows})" if gradient.is_sparse else f"dense {gradient.dense}"


def _touched_rows_lines(training: TrainingGraph, sparsity: Sparsity | None) -> tuple[str, ...]:
    """Say of every table how many of its rows a step touches, and how that is known."""
    measured = sparsity.parameters if sparsity is not None else {}
    return tuple(
        measured_sentence(name, measured[name], sparsity)
        if sparsity is not None and name in measured
        else f"{name}: rows touched in a step are assumed while compiling (all rows drawn alike)"
        + (": its ids do not follow from the data alone." if sparsity is not None else "; see --sample-data.")
        for name, gradient in training.gradients.items()
        if gradient.is_sparse
    )


def _part(name: str, nodes: frozenset[str], flops: Mapping[str, int] | None) -> InspectedPart:
    return InspectedPart(
        name, len(nodes), None if flops is None else sum(flops.get(node, 0) for node in nodes)
    )
