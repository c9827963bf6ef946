"""`partc executor`: one rank of a job, or the files that it runs."""

from pathlib import Path
from typing import Annotated

import typer

from partc.compiler.commands.arguments.parse_options import parse_sizes
from partc.compiler.commands.console import answer, refuse_json, tell
from partc.compiler.commands.results.plans import Materialised
from partc.compiler.output.materialise import materialise, read_central_plan, read_decisions
from partc.runtime.engines.rank_command import DAEMON
from partc.runtime.errors import BadUsage
from partc.runtime.jobs.job import JOB_FILE

EPILOG = """Started by `partc run` under mpiexec; by hand: mpiexec -n 4 partc executor JOB

Without a compilation: partc executor --materialise --model out/train.onnx --strategy out/strategy.json
--cluster out/cluster.json --rank 1 -o rank1: writes what rank 1 runs, as `partc compile` does."""


def executor_command(
    job: Annotated[Path | None, typer.Argument(help="The folder of a job, as `partc run` makes it.")] = None,
    make: Annotated[
        bool, typer.Option("--materialise", help="Write one rank's segments instead, from decisions.")
    ] = False,
    model: Annotated[Path | None, typer.Option(help="The training graph.")] = None,
    strategy: Annotated[Path | None, typer.Option(help="strategy.json.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="cluster.json.")] = None,
    rank: Annotated[int, typer.Option(help="The rank whose segments are made.")] = 0,
    size: Annotated[list[str], typer.Option("--size", help="NAME=N, as given to compile.")] = [],
    plan: Annotated[
        Path | None, typer.Option(help="plan.json of a compilation: hashes are compared with it.")
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--output", help="Folder to write.")] = None,
) -> None:
    """Run one rank of a job: the daemon itself, one per device."""
    if make:
        if model is None or strategy is None or cluster is None or out is None:
            raise BadUsage(
                "decisions are missing",
                at="--materialise",
                fix="give --model, --strategy, --cluster and -o: `partc compile` writes these files",
            )
        central = read_central_plan(plan) if plan is not None else None
        decisions = read_decisions(model, strategy, cluster, parse_sizes(size), central)
        result = materialise(decisions, rank, out, central)
        compared = "" if central is None else ", equal to those of the plan"
        tell(f"rank {rank}: {len(result)} files -> {out}{compared}")
        answer(Materialised(rank, tuple(map(str, result)), str(out), central is not None))
        return
    if job is None or not (job / JOB_FILE).is_file():
        raise BadUsage(
            "no job lies there",
            at="partc executor" if job is None else str(job),
            fix="use `partc run`, which makes a job and starts it",
        )
    refuse_json(
        "one rank of a job has no results of its own",
        fix="leave it out; `partc run --json` writes the results of all ranks",
    )
    from partc.runtime.engines import begin_rank

    raise typer.Exit(begin_rank.main(["started", DAEMON, str(job)]))
