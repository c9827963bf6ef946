"""`partc inspect`: what a training graph holds."""

from dataclasses import fields
from typing import Annotated

import typer
from rich.text import Text

from partc.compiler.api import inspect
from partc.compiler.commands.arguments.parse_options import parse_sizes
from partc.compiler.commands.arguments.shared_arguments import (
    AxesArgument,
    InitialArgument,
    LossArgument,
    SampleDataArgument,
    SampleStepsArgument,
    SizesArgument,
    StateArgument,
    TrainArgument,
    graph_options,
    sample_of,
)
from partc.compiler.commands.console import answer, show, working_on
from partc.compiler.commands.results.models import Inspected

GroupsArgument = Annotated[
    bool,
    typer.Option("--groups", help="Show instead what a strategy may split: the operators and dimensions."),
]

EPILOG = "Example: partc inspect train.onnx"


def inspect_command(
    train: TrainArgument,
    state: StateArgument = [],
    sample_axis: AxesArgument = [],
    loss: LossArgument = "",
    initial: InitialArgument = None,
    size: SizesArgument = [],
    sample_data: SampleDataArgument = "",
    sample_steps: SampleStepsArgument = None,
    groups: GroupsArgument = False,
) -> None:
    """Show variables, gradients, data inputs, and the work of one step."""
    options = graph_options(state, sample_axis, loss, initial)
    with working_on("reading"):
        inspection = inspect(
            train, sizes=parse_sizes(size), options=options, sample=sample_of(sample_data, sample_steps)
        )
    if groups:
        show(Text(inspection.render_groups()), is_wrapped=False)
    else:
        show(inspection.render())
    answer(Inspected(**{field.name: getattr(inspection, field.name) for field in fields(inspection)}))
