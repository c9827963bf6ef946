"""`partc search`: find a quick strategy for a cluster, as a file that compile takes."""

from pathlib import Path
from typing import Annotated

import typer

from partc.compiler.api import search
from partc.compiler.commands.arguments import compile_arguments as arguments
from partc.compiler.commands.arguments.parse_options import parse_seconds, parse_sizes
from partc.compiler.commands.arguments.shared_arguments import (
    AxesArgument,
    InitialArgument,
    LossArgument,
    SizesArgument,
    StateArgument,
    TrainArgument,
    graph_options,
)
from partc.compiler.commands.command_line import panels
from partc.compiler.commands.console import answer, note, tell
from partc.compiler.commands.results.plans import StrategyFound
from partc.compiler.options import SEARCH_BUDGET, Options, SearchOptions
from partc.compiler.output.output_paths import check_output_file
from partc.compiler.report.units import plural, seconds
from partc.compiler.search.whole_steps import Priced
from partc.cost.strategy import write_strategy

EPILOG = "Example: partc search train.onnx -c examples/cluster-2x2.json --batch global -o strategy.json"


def search_command(
    train: TrainArgument,
    cluster: arguments.ClusterFile,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="The strategy.json to write.", rich_help_panel=panels.OUTPUT),
    ],
    budget: arguments.SearchBudget = SEARCH_BUDGET,
    seed: arguments.SearchSeed = 0,
    method: arguments.SearchMethodName = "auto",
    proposals: arguments.SearchProposals = None,
    together: arguments.SearchTogether = None,
    profile: arguments.ProfileFile = None,
    batch: arguments.BatchReadingName = None,
    state: StateArgument = [],
    sample_axis: AxesArgument = [],
    loss: LossArgument = "",
    initial: InitialArgument = None,
    size: SizesArgument = [],
) -> None:
    """Find a quick strategy by simulated steps: names, and operators' own devices and degrees."""
    check_output_file(output, (train, cluster, profile, initial))
    output.parent.mkdir(parents=True, exist_ok=True)  # before the search, whose answer is not to be lost
    options = Options(
        search=SearchOptions(parse_seconds(budget, "--budget"), seed, method, proposals, together),
        batch=batch,
        profile=profile,
        sizes=parse_sizes(size),
        options=graph_options(state, sample_axis, loss, initial),
    )
    result = search(train, cluster, options, _show)
    write_strategy(result.best.strategy, output)
    tell(
        f"{result.best.name}: {_compare(result.best, result.data_parallel)}; "
        f"{plural(result.proposals, 'proposal')} and "
        f"{plural(result.priced, 'strategy', 'strategies')} priced, "
        f"{result.refused} not possible, in {seconds(result.seconds)} -> {output}"
    )
    for remark in result.remarks:
        tell(f"  {remark}")
    answer(
        StrategyFound(
            output=str(output),
            name=result.best.name,
            step_s=result.best.step_s,
            data_parallel_s=None if result.data_parallel is None else result.data_parallel.step_s,
            proposals=result.proposals,
            priced=result.priced,
            refused=result.refused,
            searched_s=result.seconds,
            remarks=result.remarks,
        )
    )


def _show(best: Priced, data_parallel: Priced | None) -> None:
    note(f"  {best.name}: {_compare(best, data_parallel)}")


def _compare(best: Priced, data_parallel: Priced | None) -> str:
    if data_parallel is None:
        return f"{seconds(best.step_s)} a step; data parallelism does not fit in memory"
    ratio = data_parallel.step_s / best.step_s
    return f"{seconds(best.step_s)} a step, {ratio:.2f}x as fast as data parallelism"
