"""Train a plan and the user's own graph on the same batches, and compare.

plan ─ launcher ─> variables, losses ─┐
                                      ├─ compare_changes ─> VerifyReport
model ─ reference ─> variables, losses ┘
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from partc.compiler.verification.compare_changes import (
    LossCheck,
    Trained,
    VariableCheck,
    compare_changes,
    compare_losses,
    default_rtol,
)
from partc.compiler.verification.reference import Reference, make_reference
from partc.compiler.verification.uncertain_steps import Uncertainty
from partc.runtime.asynchronous.session import with_one_worker
from partc.runtime.data.batches import check_total_batch
from partc.runtime.data.feeds import open_source
from partc.runtime.data.initial import InitialValues
from partc.runtime.data.step_draws import draw_total
from partc.runtime.errors import BadData, BadUsage
from partc.runtime.in_process import train_in_process
from partc.runtime.launcher import OnProgress
from partc.runtime.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.results import TrainingResult
from partc.runtime.runner import Runner

SHOWN_VARIABLES = 20  # by `partc verify`: a deep network has hundreds

Array = np.ndarray[Any, np.dtype[Any]]
Batch = Mapping[str, Array]
Data = str | Path | Sequence[Batch]
Launcher = Callable[[PlanFolder, Data, int, int], TrainingResult]  # (plan, data, steps, seed)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What verify found."""

    replicas: int
    ranks: int
    steps: int
    batch: str
    variables: tuple[VariableCheck, ...]
    losses: tuple[LossCheck, ...]
    disagreeing: tuple[str, ...]  # variables whose copies differ between ranks
    left_out: int = 0  # asynchronous workers that were left out, so that there is something to compare with
    bodies: Mapping[str, float] = field(default_factory=dict)  # convolution -> see Reference.compare_bodies
    body_rtol: float = 0.0

    @property
    def passed(self) -> bool:
        """Tell whether the plan trains as one device does."""
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
        worst_first = sorted(self.variables, key=lambda c: (c.verdict == "equal", -_share(c)))
        if left_out := worst_first[most:]:
            equal = sum(check.verdict == "equal" for check in left_out)
            table.caption = f"and {len(left_out)} more, {equal} of them equal"
        for check in worst_first[:most]:
            numbers = [f"{number:.3g}" for number in (check.max_change, check.max_error, check.limit)]
            verdict = "copies differ between ranks" if check.name in self.disagreeing else check.verdict
            style = "" if verdict == "equal" else "bold red"
            table.add_row(check.name, *numbers, verdict, style=style)
        return table

    def summary(self) -> str:
        """Return one line: what was compared, and the outcome."""
        wrong = [check.name for check in self.variables if check.verdict != "equal"]
        losses = [loss.step for loss in self.losses if not loss.is_equal]
        told = [
            f"{len(wrong)} of {len(self.variables)} variables differ ({', '.join(wrong[:3])})"
            if wrong
            else "",
            f"the loss differs from step {losses[0]} on" if losses else "",
            f"copies of {', '.join(self.disagreeing[:3])} differ between ranks" if self.disagreeing else "",
            f"partc convolves {', '.join(self.wrong_bodies[:3])} otherwise than ONNX Runtime"
            if self.wrong_bodies
            else "",
        ]
        worst = max((_share(check) for check in self.variables), default=0.0)
        equal = f"all {len(self.variables)} variables equal, worst error {worst:.2g} of what is allowed"
        outcome = "; ".join(filter(None, told)) or equal
        alone = f" ({self.left_out} asynchronous workers left out)" if self.left_out else ""
        compared = f"{self.ranks} ranks{alone} against one device, {self.steps} steps, {self.batch} batch"
        excused = sum(check.excused for check in self.variables)
        elements = f"{excused} element{'s' * (excused > 1)}"
        noise = f"; {elements} off by what their gradients' rounding makes" if excused else ""
        return f"{compared}: {outcome}{self._told_of_bodies()}{noise}"

    def _told_of_bodies(self) -> str:
        if not self.bodies or self.wrong_bodies:
            return ""
        largest = max(self.bodies.values())
        return (
            f"; {len(self.bodies)} convolutions computed partc's way, within {largest:.1g} of ONNX Runtime's"
        )


def _share(check: VariableCheck) -> float:
    if check.limit == 0.0:
        return 0.0 if check.max_error == 0.0 else float("inf")
    return check.max_error / check.limit


def launch_daemons(
    folder: PlanFolder, data: Data, steps: int, seed: int, on_progress: OnProgress | None = None
) -> TrainingResult:
    """Train with one daemon per rank, as `partc run` does, but leave trained.safetensors alone."""
    return Runner(folder).train(
        data, steps, seed=seed, stop_when_diverged=False, on_progress=on_progress, save=False
    )


def launch_in_process(folder: PlanFolder, data: Data, steps: int, seed: int) -> TrainingResult:
    """Train all ranks in this process, in lockstep."""
    batches = _total_batches(folder, data, steps, seed)
    return train_in_process(folder, batches, stop_when_diverged=False, seed=seed)


def verify(
    plan_folder: PlanFolder | Path | str,
    *,
    steps: int = 4,
    rtol: float | None = None,
    data: Data = "synthetic",
    seed: int = 0,
    launcher: Launcher = launch_daemons,
    on_step: Callable[[int], None] = lambda step: None,
) -> VerifyReport:
    """Train the plan, and the user's graph on one device on the same total batches, and compare.

    Of an asynchronous plan, the first worker trains alone: only then is one device its measure.

    `rtol` None means 1e-9 for float64 variables and 1e-4 for float32. `data` is what `partc run` reads,
    or total batches. `on_step` is told every step (from 1) that the reference has done.
    """
    if steps < 1:
        raise BadUsage(f"{steps} steps", at="--steps", fix="compare at least one step")
    if rtol is not None and not 0 <= rtol < float("inf"):
        raise BadUsage(f"a tolerance of {rtol}", at="--rtol", fix="give a number from 0 on, as 1e-4")
    folder = plan_folder if isinstance(plan_folder, PlanFolder) else read_plan_folder(plan_folder)
    left_out = max(0, len(folder.plan.asynchronous) - 1)
    folder = with_one_worker(folder)
    plan = folder.plan
    values = InitialValues(folder)
    start = {variable.name: values.rows(variable.name) for variable in plan.variables}
    batches = _total_batches(folder, data, steps, seed)
    # A function may give other batches when called again; files and seeds give the same.
    is_repeatable = isinstance(data, Path) or data == "synthetic" or str(data).endswith(".npz")
    result = launcher(folder, data if is_repeatable else batches, steps, seed)
    drawn = [draw_total(plan, batch, step, seed) for step, batch in enumerate(batches)]
    given = [{**batch, **draws} for batch, draws in zip(batches, drawn, strict=True)]
    reference = make_reference(plan, folder.path / plan.model)
    bodies = reference.compare_bodies(start, given[0])
    uncertainty = Uncertainty(plan.variables)
    end, outputs = _train_reference(reference, start, given, uncertainty, on_step)
    trained = {
        v.name: Trained(
            v, start[v.name], result.variables[v.name], end[v.name], uncertainty.elements.get(v.name, 0.0)
        )
        for v in plan.variables
    }
    return VerifyReport(
        replicas=plan.replicas,
        ranks=len(plan.ranks),
        steps=steps,
        batch=plan.batch,
        variables=compare_changes(trained, steps, rtol),
        losses=compare_losses(plan.loss, result.outputs, outputs, rtol),
        disagreeing=tuple(result.disagreeing),
        left_out=left_out,
        bodies=bodies,
        body_rtol=default_rtol(np.dtype(np.float32)) if rtol is None else rtol,
    )


def _total_batches(folder: PlanFolder, data: Data, steps: int, seed: int) -> list[Batch]:
    if isinstance(data, str | Path):
        source = open_source(str(data), folder.plan, seed)
        return [source.total(step) for step in range(steps)]
    batches = list(islice(data, steps))
    if len(batches) < steps:
        raise BadData(
            f"{len(batches)} batches for {steps} steps", at="data", fix="give one total batch per step"
        )
    for batch in batches:
        check_total_batch(folder.plan, batch)
    return batches


def _train_reference(
    reference: Reference,
    start: Mapping[str, Array],
    batches: Sequence[Batch],
    uncertainty: Uncertainty,
    on_step: Callable[[int], None],
) -> tuple[dict[str, Array], list[dict[str, Array]]]:
    variables, outputs = dict(start), []
    for step, batch in enumerate(batches, 1):
        made = reference.step(variables, batch)
        uncertainty.add_step(variables, made.variables, made.gradients)
        variables = made.variables
        outputs.append(made.outputs)
        on_step(step)
    return variables, outputs
