"""The arguments that `partc run` alone has."""

from typing import Annotated, Literal

import typer

from partc.compiler.commands.command_line import panels

Steps = Annotated[int, typer.Option(help="How many steps to train, with those of a resumed training.")]
Shuffle = Annotated[
    bool,
    typer.Option(
        "--shuffle",
        help="Shuffle the samples of files, in every epoch anew, by the seed.",
        rich_help_panel=panels.DATA,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="The seed of synthetic data and of what a step draws: 0, if none is given.",
        rich_help_panel=panels.DATA,
    ),
]
SaveEvery = Annotated[
    str,
    typer.Option(
        help="Save a checkpoint after every so many steps, or seconds: 1000, 90s, 10min.",
        rich_help_panel=panels.CHECKPOINTS,
    ),
]
Keep = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="With --save-every: how many checkpoints stay; 3, if nothing is said.",
        rich_help_panel=panels.CHECKPOINTS,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on from the newest checkpoint that is whole.", rich_help_panel=panels.CHECKPOINTS
    ),
]
Restarts = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="How often to go on from the last checkpoint when a rank failed: 0, if nothing is said. "
        "How often each asynchronous worker that died is started again: 3.",
        rich_help_panel=panels.FAULTS,
    ),
]
MinHosts = Annotated[
    int,
    typer.Option(
        min=0,
        help="With --restarts: go on without hosts that are lost, with so many at least.",
        rich_help_panel=panels.FAULTS,
    ),
]
OnNan = Annotated[
    Literal["stop", "continue"],
    typer.Option(help="What to do when the loss is not finite.", rich_help_panel=panels.FAULTS),
]
Timeout = Annotated[
    float, typer.Option(help="Seconds without progress that end the run.", rich_help_panel=panels.FAULTS)
]
TraceSteps = Annotated[
    str | None,
    typer.Option(
        help="With --trace: the steps that it shows: 3, the last three, if nothing is said; 100-105,500, "
        "these; 500-500, that one.",
        metavar="STEPS",
        rich_help_panel=panels.WATCHED,
    ),
]
MostStaleness = Annotated[
    int | None,
    typer.Option(help="Of an asynchronous plan: the most steps a worker may be ahead of the slowest."),
]
MetricsEndpoint = Annotated[
    str,
    typer.Option(
        help="Answer Prometheus on this port, to this machine alone unless an address is given: 9400, "
        "0.0.0.0:9400.",
        metavar="[ADDRESS:]PORT",
        rich_help_panel=panels.WATCHED,
    ),
]
