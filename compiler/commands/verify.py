"""`partc verify`: hold a plan against one device."""

from typing import Annotated

import typer

from partc.compiler.commands.arguments.shared_arguments import DataArgument, PlanArgument
from partc.compiler.commands.console import answer, progress_of, show, tell
from partc.compiler.commands.results.plans import CheckedLoss, CheckedVariable, Verified
from partc.compiler.verification.verify import VerifyReport, verify

EPILOG = "Example: partc verify out --steps 4"


def verify_command(
    out: PlanArgument,
    steps: Annotated[int, typer.Option(help="How many steps to compare.")] = 4,
    rtol: Annotated[float | None, typer.Option(help="Allowed relative error of a variable's change.")] = None,
    data: DataArgument = "synthetic",
    seed: Annotated[int, typer.Option(help="The seed of synthetic data and of what a step draws.")] = 0,
) -> None:
    """Train on all ranks, and compare every step with one device on the same total batch."""
    with progress_of("all ranks and one device", steps) as advance:
        report = verify(out, steps=steps, rtol=rtol, data=data, seed=seed, on_step=advance)
    show(report.table())
    tell(("verified: " if report.passed else "NOT EQUAL: ") + report.summary())
    answer(_record(report))
    if not report.passed:
        raise typer.Exit(1)


def _record(report: VerifyReport) -> Verified:
    variables = (
        CheckedVariable(c.name, c.verdict, c.step, c.max_change, c.max_error, c.limit)
        for c in report.variables
    )
    losses = (
        CheckedLoss(loss.step, loss.loss, loss.reference, loss.limit, loss.is_equal) for loss in report.losses
    )
    return Verified(
        passed=report.passed,
        ranks=report.ranks,
        replicas=report.replicas,
        steps=report.steps,
        batch=report.batch,
        variables=tuple(variables),
        losses=tuple(losses),
        disagreeing=report.disagreeing,
        departures=report.departures,
        summary=report.summary(),
    )
