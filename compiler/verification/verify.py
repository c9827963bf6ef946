"""Train a plan, and hold each of its steps against the user's own graph on the same total batch.

    variables before step s ─┬─ ranks ────────> variables after ─┐
                             │                                   ├─ compare_changes ─> VerifyReport
                             └─ reference ────> variables after ─┘

Before step 1 the variables are the model's first values; before every later step they are what the ranks
hold themselves, once all copies are found bitwise equal. So no error of rounding is carried from step to
step, and by induction over the steps the whole run is what one device computes. The total batches are read
and drawn here (total_batches.py), not taken from the ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from partc.compiler.planning.choose_reading import departures_of_training
from partc.compiler.verification.compare_changes import (
    LossCheck,
    VariableCheck,
    VariableStates,
    compare_changes,
    compare_losses,
    default_rtol,
    lost_variables,
    worst_of_steps,
)
from partc.compiler.verification.ranks import Data, Launcher, Ranks, launch_daemons, launch_in_process
from partc.compiler.verification.reference import TABLE_LIMIT_BYTES, Reference, make_reference
from partc.compiler.verification.rounding import RoundingError
from partc.compiler.verification.total_batches import total_batches
from partc.runtime.asynchronous.sessions.session import with_one_worker
from partc.runtime.callers_code import callers_function
from partc.runtime.check_arguments import public
from partc.runtime.data.feeds import open_source
from partc.runtime.data.initial import InitialValues
from partc.runtime.data.not_finite import Index, element, with_cause
from partc.runtime.data.step_draws import draw_total
from partc.runtime.errors import BadUsage, Diverged
from partc.runtime.execution.row_hashes import row_hashes
from partc.runtime.plan.boxes import rows_box
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.program import Aggregation, Plan
from partc.runtime.plan.variables import DataInput

__all__ = ["VerifyReport", "launch_daemons", "launch_in_process", "verify"]

SHOWN_VARIABLES = 20  # by `partc verify`: a deep network has hundreds
_INITIAL_BLOCK_BYTES = 1 << 24

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What verify found."""

    replicas: int
    ranks: int
    steps: int
    batch: str
    variables: tuple[VariableCheck, ...]  # the worst step of each
    losses: tuple[LossCheck, ...]
    disagreeing: tuple[str, ...]  # variables whose copies differ between ranks; no later step was compared
    left_out: int = 0  # asynchronous workers that were left out, so that there is something to compare with
    bodies: Mapping[str, float] = field(default_factory=dict)  # convolution -> see Reference.compare_bodies
    body_rtol: float = 0.0
    tables: tuple[str, ...] = ()  # compared by the rows that steps touch, and a hash of every other row
    departures: tuple[str, ...] = ()  # in which replicas are known to train otherwise than one device
    joining: str = "averaged"  # how the replicas' gradients become one

    @property
    def passed(self) -> bool:
        """Tell whether the plan trains as its reference does: one device, or replicas on it that depart."""
        equal = all(check.verdict == "equal" for check in self.variables)
        return (
            equal
            and all(loss.is_equal for loss in self.losses)
            and not self.disagreeing
            and not self.wrong_bodies
        )

    @property
    def wrong_bodies(self) -> list[str]:
        """Return the convolutions whose chosen bodies give other results than ONNX Runtime's own."""
        return [name for name, difference in self.bodies.items() if not difference <= self.body_rtol]

    def table(self, most: int = SHOWN_VARIABLES) -> Table:
        """Return the variables as a table, worst first, and how many of them are left out."""
        table = Table("variable", "max change", "max error", "allowed", "verdict")
        worst_first = sorted(self.variables, key=lambda c: (c.verdict == "equal", -c.share))
        if left_out := worst_first[most:]:
            equal = sum(check.verdict == "equal" for check in left_out)
            table.caption = f"and {len(left_out)} more, {equal} of them equal"
        for check in worst_first[:most]:
            numbers = [f"{number:.3g}" for number in (check.max_change, check.max_error, check.limit)]
            verdict = check.verdict if check.verdict == "equal" else f"{check.verdict} in step {check.step}"
            if check.name in self.disagreeing:
                verdict = "copies differ between ranks"
            table.add_row(check.name, *numbers, verdict, style="" if verdict == "equal" else "bold red")
        return table

    def summary(self) -> str:
        """Return one line: what was compared, and the outcome."""
        wrong = [check for check in self.variables if check.verdict != "equal"]
        losses = [loss.step for loss in self.losses if not loss.is_equal]
        failures = [
            f"{len(wrong)} of {len(self.variables)} variables differ"
            f" ({', '.join(check.name for check in wrong[:3])}), first in step"
            f" {min(check.step for check in wrong)}"
            if wrong
            else "",
            f"the loss differs in step {losses[0]}" if losses else "",
            f"copies of {', '.join(self.disagreeing[:3])} differ between ranks" if self.disagreeing else "",
            f"partc convolves {', '.join(self.wrong_bodies[:3])} otherwise than ONNX Runtime"
            if self.wrong_bodies
            else "",
        ]
        worst = max((check.share for check in self.variables), default=0.0)
        equal = f"all {len(self.variables)} variables equal, worst error {worst:.2g} of what is allowed"
        outcome = "; ".join(filter(None, failures)) or equal
        alone = f" ({self.left_out} asynchronous workers left out)" if self.left_out else ""
        compared = (
            f"{self.ranks} ranks{alone} against {self._reference()}, {self.steps} steps, {self.batch} batch"
        )
        remarks = (
            self._bodies_sentence()
            + self._tables_sentence()
            + self._rounding_sentence()
            + self._lost_losses_sentence()
            + self._departures_sentence()
        )
        return f"{compared}: {outcome}{remarks}"

    def _reference(self) -> str:
        """Say what the ranks were held against."""
        if not self.departures:
            return "one device"
        return f"{self.replicas} replicas on one device, their gradients {self.joining}"

    def _departures_sentence(self) -> str:
        if not self.departures:
            return ""
        more = f", and {len(self.departures) - 1} more" * (len(self.departures) > 1)
        return (
            "; the plan is known to depart from one device on all samples, which --batch global does not: "
            f"{self.departures[0]}{more}"
        )

    def _bodies_sentence(self) -> str:
        if not self.bodies or self.wrong_bodies:
            return ""
        largest = max(self.bodies.values())
        return (
            f"; {len(self.bodies)} convolutions computed partc's way, within {largest:.1g} of ONNX Runtime's"
        )

    def _tables_sentence(self) -> str:
        if not self.tables:
            return ""
        count = len(self.tables)
        return f"; {count} large table{'s' * (count > 1)} by the rows that steps touch, all others by a hash"

    def _lost_losses_sentence(self) -> str:
        lost = [str(loss.step) for loss in self.losses if loss.is_lost]
        steps = f"step{'s' * (len(lost) > 1)} {', '.join(lost[:8])}{', ...' * (len(lost) > 8)}"
        return f"; the loss is no finite number on both sides in {steps}" if lost else ""

    def _rounding_sentence(self) -> str:
        within_rounding = sum(check.within_rounding for check in self.variables)
        elements = f"{within_rounding} element{'s' * (within_rounding > 1)}"
        return f"; {elements} off by what their gradients' rounding makes" if within_rounding else ""


@public
def verify(
    plan_folder: PlanFolder | Path | str,
    *,
    steps: int = 4,
    rtol: float | None = None,
    data: Data = "synthetic",
    seed: int = 0,
    launcher: Launcher = launch_daemons,
    on_step: Callable[[int], None] = lambda step: None,
    table_limit_bytes: int = TABLE_LIMIT_BYTES,
) -> VerifyReport:
    """Train the plan, and compare each step with the user's graph on one device, from the same variables.

    Of an asynchronous plan, the first worker trains alone: only then is one device its measure.

    `rtol` None means 1e-9, 1e-4 or 1e-2, where the narrowest float type that a change passes through is
    float64, float32 or another. `data` is what `partc run` reads, or total batches. `on_step` is told every
    step (from 1) that the reference has done. Of a table of more than `table_limit_bytes` that is read and
    written by rows, these are compared, and a hash of the others.
    """
    _check_request(steps, rtol)
    folder = plan_folder if isinstance(plan_folder, PlanFolder) else read_plan_folder(plan_folder)
    left_out = max(0, len(folder.plan.asynchronous) - 1)
    folder = with_one_worker(folder)
    plan = folder.plan
    reference = make_reference(plan, folder.path / plan.model, table_limit_bytes)
    data, batches = _repeatable(plan, data, steps, seed)
    with launcher(folder, data, steps, seed) as ranks:
        comparison = _Comparison(folder, reference, ranks, rtol)
        variables, losses = _compare_steps(comparison, plan, batches, data, seed, callers_function(on_step))
    return VerifyReport(
        replicas=plan.replicas,
        ranks=len(plan.ranks),
        steps=steps,
        batch=plan.batch,
        variables=worst_of_steps(variables),
        losses=tuple(losses),
        disagreeing=comparison.disagreeing,
        left_out=left_out,
        bodies=comparison.bodies,
        body_rtol=default_rtol(np.dtype(np.float32)) if rtol is None else rtol,
        tables=tuple(reference.tables),
        departures=departures_of_training(plan.departures) if plan.batch == "per-replica" else (),
        joining=_joining(plan.aggregation),
    )


def _joining(aggregation: Aggregation) -> str:
    words = {True: "averaged", False: "summed"}
    dense, sparse = words[aggregation.average_dense], words[aggregation.average_sparse]
    return dense if dense == sparse else f"{dense}, indexed slices {sparse}"


def _check_request(steps: int, rtol: float | None) -> None:
    if steps < 1:
        raise BadUsage(f"{steps} steps", at="--steps", fix="compare at least one step")
    if rtol is not None and not 0 <= rtol < float("inf"):
        raise BadUsage(f"a tolerance of {rtol}", at="--rtol", fix="give a number from 0 on, as 1e-4")


def _repeatable(plan: Plan, data: Data, steps: int, seed: int) -> tuple[Data, Iterator[Mapping[str, Array]]]:
    """Return the data that the ranks read, and the total batches: of a function, what it gives once."""
    batches = total_batches(plan, data, steps, seed)
    # A function may give other batches when called again; files and seeds give the same.
    if isinstance(data, Path) or (isinstance(data, str) and (data == "synthetic" or data.endswith(".npz"))):
        return data, iter(batches)
    stored = list(batches)
    return stored, iter(stored)


def _compare_steps(
    comparison: "_Comparison",
    plan: Plan,
    batches: Iterable[Mapping[str, Array]],
    data: Data,
    seed: int,
    on_step: Callable[[int], None],
) -> tuple[list[VariableCheck], list[LossCheck]]:
    """Train and compare step by step, until copies differ. Raises Diverged where both sides do alike."""
    variables: list[VariableCheck] = []
    losses: list[LossCheck] = []
    for step, batch in enumerate(batches, 1):
        of_step = comparison.step(step, {**batch, **draw_total(plan, batch, step - 1, seed)})
        if of_step.lost and all(check.verdict == "equal" for check in variables):
            raise with_cause(
                _both_diverged(of_step, step), plan, batch, partial(_place, plan, data, seed, step - 1)
            )
        variables += of_step.variables
        losses += of_step.losses
        on_step(step)
        if comparison.disagreeing:
            break
    return variables, losses


@dataclass(frozen=True, slots=True)
class _ComparedStep:
    variables: list[VariableCheck]
    losses: list[LossCheck]
    lost: list[str]  # variables that are not finite on both sides, and no other differs


def _both_diverged(of_step: _ComparedStep, step: int) -> Diverged:
    losses = "".join(f"the loss is {loss.loss}, and " for loss in of_step.losses if loss.is_lost)
    return Diverged(
        f"training diverges on all ranks and on one device alike: {losses}{of_step.lost[0]!r} is not finite"
        f" after step {step}",
        at=f"step {step}: up to it, all variables were equal",
        fix=f"lower the learning rate or check the data; to verify the steps before, give --steps {step - 1}"
        if step > 1
        else "lower the learning rate, or check the data and the initial values",
    )


def _place(plan: Plan, data: Data, seed: int, step: int, data_input: DataInput, index: Index) -> str:
    """Say where the user finds an element of a step's total batch. Steps count from 0."""
    if isinstance(data, str | Path):
        return open_source(str(data), plan, seed).place(None, step, data_input, index)
    return f"batch of step {step + 1}: {element(data_input.name, index)}"


class _Comparison:
    """Steps one after the other, each from what the ranks hold before it."""

    def __init__(self, folder: PlanFolder, reference: Reference, ranks: Ranks, rtol: float | None) -> None:
        self._plan = folder.plan
        self._reference, self._ranks, self._rtol = reference, ranks, rtol
        self._initial = InitialValues(folder)
        self._whole = [v.name for v in self._plan.variables if v.name not in reference.tables]
        self._before = {name: self._initial.part(name) for name in self._whole}
        self._hashes: dict[str, Array] = {}  # of the tables, before the step
        self.bodies: Mapping[str, float] = {}
        self.disagreeing: tuple[str, ...] = ()

    def step(self, step: int, batch: Mapping[str, Array]) -> _ComparedStep:
        """Train one step on both sides, from the same variables, and compare."""
        rows = self._reference.rows(self._before, batch)
        before = self._before | self._tables_before(step, rows)
        if step == 1:
            self.bodies = self._reference.compare_bodies(before, batch, rows)
        rank_outputs = self._ranks.step()
        expected = self._reference.step(before, batch, rows)
        self._before = {name: self._ranks.read(name) for name in self._whole}
        after = self._before | {name: self._ranks.read(name, row_ids) for name, row_ids in rows.items()}
        others = self._count_other_changes(rows)
        checked = {
            v.name: VariableStates(
                before[v.name],
                after[v.name],
                expected.variables[v.name],
                others.get(v.name, 0),
                self._reference.passed_types.get(v.name),
            )
            for v in self._plan.variables
        }

        @cache
        def measure(thoroughly: bool) -> RoundingError:
            return self._reference.rounding(before, batch, rows, thoroughly)

        self.disagreeing = self._ranks.disagreeing()
        compared = compare_changes(checked, step, self._rtol, measure)
        lost = lost_variables(compared, checked)
        is_alike = all(check.verdict == "equal" or check.name in lost for check in compared)
        return _ComparedStep(
            compared,
            [
                compare_losses(
                    step,
                    rank_outputs[name],
                    loss,
                    self._rtol,
                    measure,
                    self._reference.passed_types.get(name),
                )
                for name, loss in expected.outputs.items()
            ],
            lost if is_alike and not self.disagreeing else [],
        )

    def _tables_before(self, step: int, rows: Mapping[str, Array]) -> dict[str, Array]:
        if step > 1:
            return {name: self._ranks.read(name, row_ids) for name, row_ids in rows.items()}
        tables = {}
        for name, row_ids in rows.items():
            tables[name], self._hashes[name] = _initial_rows(self._plan, self._initial, name, row_ids)
        return tables

    def _count_other_changes(self, rows: Mapping[str, Array]) -> dict[str, int]:
        """Count the rows of each table that the step does not touch, and that are not as before."""
        counts = {}
        for name, row_ids in rows.items():
            hashes = self._ranks.row_hashes(name)
            is_changed = hashes != self._hashes[name]
            is_changed[row_ids] = False
            counts[name], self._hashes[name] = int(is_changed.sum()), hashes
        return counts


def _initial_rows(plan: Plan, initial: InitialValues, name: str, row_ids: Array) -> tuple[Array, Array]:
    """Return some rows of a table's first value, and the hashes of all, a block in memory at a time."""
    (variable,) = (v for v in plan.variables if v.name == name)
    row_bytes = int(np.prod(variable.shape[1:], dtype=np.int64)) * np.dtype(variable.dtype).itemsize
    block = max(1, _INITIAL_BLOCK_BYTES // max(row_bytes, 1))
    blocks, hashes = [], []
    for start in range(0, variable.shape[0], block):
        stop = min(start + block, variable.shape[0])
        rows = initial.part(name, rows_box(variable.shape, start, stop))
        blocks.append(rows[row_ids[(row_ids >= start) & (row_ids < stop)] - start])
        hashes.append(row_hashes(rows))
    return np.concatenate(blocks), np.concatenate(hashes)
