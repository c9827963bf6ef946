"""`partc inspect`: what a training graph holds."""

from partc.compiler.api import inspect
from partc.compiler.commands.arguments import parse_sizes
from partc.compiler.commands.console import console, working_on
from partc.compiler.commands.graph_arguments import (
    Axes,
    Initial,
    Loss,
    SampleData,
    SampleSteps,
    Sizes,
    State,
    TrainFile,
    graph_options,
    sample_of,
)
from partc.compiler.options import SAMPLE_STEPS

EPILOG = "Example: partc inspect train.onnx"


def inspect_command(
    train: TrainFile,
    state: State = "",
    sample_axis: Axes = [],
    loss: Loss = "",
    initial: Initial = None,
    size: Sizes = [],
    sample_data: SampleData = "",
    sample_steps: SampleSteps = SAMPLE_STEPS,
) -> None:
    """Show variables, gradients, data inputs, and the work of one step."""
    options = graph_options(state, sample_axis, loss, initial)
    with working_on("reading"):
        inspection = inspect(
            train, sizes=parse_sizes(size), options=options, sample=sample_of(sample_data, sample_steps)
        )
    console.print(inspection.render())
