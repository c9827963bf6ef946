"""`partc checkpoint`: what a training was saved as."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from partc.compiler.commands.arguments.shared_arguments import (
    CheckpointsOption,
    OutArgument,
    PlanArgument,
    checkpoints_of,
)
from partc.compiler.commands.command_line.declare import declare
from partc.compiler.commands.command_line.panels import GroupedGroup
from partc.compiler.commands.console import answer, show, tell, working_on
from partc.compiler.commands.results.trainings import CheckpointEntry, CheckpointList, Exported
from partc.compiler.output.deploy import write_forward_model
from partc.compiler.output.output_paths import check_output_file
from partc.compiler.report.units import size
from partc.runtime.checkpoints.manifest import (
    Manifest,
    folder_of,
    newest_checkpoint,
    read_manifest,
    steps_in,
    verify_checkpoint,
)
from partc.runtime.checkpoints.stored_values import StoredValues
from partc.runtime.errors import BadCheckpoint
from partc.runtime.jobs.job_folder import locked_folder
from partc.runtime.plan.plan_folder import read_plan_folder

EPILOG = "Example: partc checkpoint export out -o trained.onnx"

checkpoint_command = typer.Typer(
    cls=GroupedGroup,
    no_args_is_help=True,
    help="List, verify and export what a training was saved as.",
    epilog=EPILOG,
)
StepOption = Annotated[int | None, typer.Option(help="The checkpoint after this step; the newest if none.")]


@declare(checkpoint_command, "ls", epilog="Example: partc checkpoint ls out")
def list_checkpoints(out: PlanArgument, checkpoints: CheckpointsOption = None) -> None:
    """List the checkpoints of a plan: steps, data used, sizes; damaged ones are said to be."""
    folder = checkpoints_of(out, checkpoints)
    table = Table("step", "seed", "samples used", "size", "ranks", "written (UTC)", title=str(folder))
    entries = tuple(_entry_of(folder, step) for step in _steps(folder))
    for entry in entries:
        table.add_row(*_row(entry))
    show(table)
    answer(CheckpointList(str(folder), entries))


@declare(checkpoint_command, "verify", epilog="Example: partc checkpoint verify out --step 1000")
def verify(out: PlanArgument, step: StepOption = None, checkpoints: CheckpointsOption = None) -> None:
    """Read checkpoints whole, and hold every file against the hash that it was written with."""
    folder = checkpoints_of(out, checkpoints)
    entries = []
    for one in _steps(folder, step):
        with working_on(f"reading the checkpoint of step {one}"):
            manifest = verify_checkpoint(folder / folder_of(one))
        tell(
            f"step {one}: {len(manifest.variables)} variables, {size(_bytes(manifest))}, as they were written"
        )
        entries.append(_entry(manifest))
    answer(CheckpointList(str(folder), tuple(entries)))


@declare(checkpoint_command, "export", epilog=EPILOG)
def export(
    out: PlanArgument,
    output: OutArgument,
    step: StepOption = None,
    checkpoints: CheckpointsOption = None,
) -> None:
    """Write the forward model with a checkpoint's variables, as ONNX."""
    check_output_file(output, ())
    plan = read_plan_folder(out)
    folder = checkpoints_of(out, checkpoints)
    last = folder / folder_of(_steps(folder, step)[-1])
    chosen = last if step is not None else newest_checkpoint(folder)[0] or last
    verify_checkpoint(chosen)
    stored = StoredValues(chosen)
    stored.check(plan.plan)
    with locked_folder(out) if output.resolve().is_relative_to(out.resolve()) else nullcontext():
        write_forward_model(plan, stored.whole(), output)
    tell(f"forward model with the variables after step {stored.manifest.position.step} -> {output}")
    answer(Exported(stored.manifest.position.step, str(output)))


def _steps(folder: Path, step: int | None = None) -> list[int]:
    """Return the steps of all checkpoints, or the one that is asked for. Raises BadCheckpoint."""
    steps = steps_in(folder)
    if not steps:
        raise BadCheckpoint(
            "no checkpoints",
            at=str(folder),
            fix="save some with `partc run OUT --save-every 100`, or name their folder",
        )
    if step not in (None, *steps):
        known_steps = ", ".join(map(str, steps))
        raise BadCheckpoint(f"no checkpoint of step {step}", at=str(folder), fix=f"name one of {known_steps}")
    return steps if step is None else [step]


def _entry_of(folder: Path, step: int) -> CheckpointEntry:
    try:
        return _entry(read_manifest(folder / folder_of(step)))
    except BadCheckpoint as error:
        return CheckpointEntry(step, error.what)


def _entry(manifest: Manifest) -> CheckpointEntry:
    position = manifest.position
    return CheckpointEntry(
        step=position.step,
        seed=position.seed,
        samples=position.samples,
        size_bytes=_bytes(manifest),
        ranks=len(manifest.files),
        variables=len(manifest.variables),
        written_at=manifest.written_at,
    )


def _row(entry: CheckpointEntry) -> tuple[str, ...]:
    if entry.size_bytes is None:
        return (str(entry.step), *[""] * 4, entry.damage)
    samples = "" if entry.samples is None else f"{entry.samples:,}"
    numbers = (entry.step, entry.seed, samples, size(entry.size_bytes), entry.ranks)
    return (*map(str, numbers), entry.written_at.removesuffix("+00:00"))


def _bytes(manifest: Manifest) -> int:
    return sum(stored.size for stored in manifest.files.values())
