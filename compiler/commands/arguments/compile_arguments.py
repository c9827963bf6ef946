"""The arguments that `partc compile` alone has."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from partc.compiler.commands.command_line import panels
from partc.compiler.commands.command_line.completion import (
    CLUSTERS,
    JSON,
    complete_files,
    complete_mechanisms,
    complete_strategies,
)
from partc.compiler.options import SearchMethod, SearchMode
from partc.cost.strategy import Batch
from partc.passes.search.operators.operator_space import Together

ClusterFile = Annotated[
    Path,
    typer.Option(
        "-c",
        "--cluster",
        help="cluster.json, or a resource file.",
        rich_help_panel=panels.CLUSTER,
        autocompletion=complete_files(*CLUSTERS),
    ),
]
StrategyName = Annotated[
    str,
    typer.Option(
        help="auto, hybrid, allreduce, ps, search or placed; data=N, tensor=K, fsdp, spatial=K, "
        "pipeline=K, microbatches=M, replicas=R, workers=K and products with commas; one-weird-trick, "
        "layerwise; or a strategy.json.",
        rich_help_panel=panels.STRATEGY,
        autocompletion=complete_strategies,
    ),
]
SearchBudget = Annotated[
    str, typer.Option(help="How long to search, such as 60s or 5min.", rich_help_panel=panels.STRATEGY)
]
SearchSeed = Annotated[
    int, typer.Option(help="The seed of what a search tries.", rich_help_panel=panels.STRATEGY)
]
SearchMethodName = Annotated[
    SearchMethod,
    typer.Option(
        help="How to search: docs/search.md tells which method is for what.", rich_help_panel=panels.STRATEGY
    ),
]
SearchProposals = Annotated[
    int | None,
    typer.Option(
        help="How many configurations of operators a search tries, in place of --budget: the same on every "
        "machine.",
        min=1,
        rich_help_panel=panels.STRATEGY,
    ),
]
SearchTogether = Annotated[
    Together | None,
    typer.Option(
        rich_help_panel=panels.STRATEGY,
        help="What a search gives one configuration: the steps of a recurrence, or repeated layers as well. "
        "Left out: they may differ.",
    ),
]
BatchReadingName = Annotated[
    Batch | None,
    typer.Option(
        help="What the graph's batch is: one replica's, or the whole. Left out: one replica's where that "
        "is proven to train what one device trains, else the whole.",
        rich_help_panel=panels.STEP,
    ),
]
PartitionSearchMode = Annotated[
    SearchMode | None,
    typer.Option(
        help="Choose the partitions of large variables on servers: by the cost model, by short runs of "
        "every number, or by a curve through a few of them; off takes the minimum.",
        rich_help_panel=panels.STRATEGY,
    ),
]
MinPartitions = Annotated[
    int | None,
    typer.Option(
        help="With --search-partitions: the fewest to consider; 1, if nothing is said.",
        rich_help_panel=panels.STRATEGY,
    ),
]
DisabledMechanisms = Annotated[
    list[str],
    typer.Option(
        help="Switch a mechanism off: local-aggregation, post-aggregation or boundary-ops; repeatable.",
        rich_help_panel=panels.STRATEGY,
        autocompletion=complete_mechanisms,
    ),
]
Asynchronous = Annotated[
    bool,
    typer.Option(
        "--asynchronous",
        help="Workers push and pull without waiting for each other: not what one device trains.",
        rich_help_panel=panels.STRATEGY,
    ),
]
SumDense = Annotated[
    bool,
    typer.Option(
        "--sum-dense", help="Sum dense gradients over replicas: no average.", rich_help_panel=panels.GRADIENTS
    ),
]
SumSparse = Annotated[
    bool,
    typer.Option(
        "--sum-sparse",
        help="Sum sparse gradients over replicas: no average.",
        rich_help_panel=panels.GRADIENTS,
    ),
]
FetchGradients = Annotated[
    str,
    typer.Option(
        help="Parameters NAME,... whose aggregated gradients are outputs: NAME.aggregated.",
        rich_help_panel=panels.GRADIENTS,
    ),
]
RecomputeSize = Annotated[
    str,
    typer.Option(
        help="SIZE, such as 800MB, that a step's values may take at once: others are computed again.",
        metavar="SIZE",
        rich_help_panel=panels.LIMITS,
    ),
]
RoundSums = Annotated[
    Literal["float16", "bfloat16"] | None,
    typer.Option(
        help="Round dense gradients to 16 bits before they are sent, sum them in float32: half the bytes, "
        "not what one device trains.",
        rich_help_panel=panels.LIMITS,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Replace trained variables that lie in the output folder.",
        rich_help_panel=panels.OUTPUT,
    ),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="Kernels as `partc profile` measured them: prices are made of these, and of rooflines for "
        "others.",
        metavar="PROFILE.json",
        rich_help_panel=panels.CLUSTER,
        autocompletion=complete_files(*JSON),
    ),
]
DecisionsOnly = Annotated[
    bool,
    typer.Option(
        "--decisions-only",
        help="Write train.onnx, strategy.json and cluster.json, from which ranks make their segments.",
        rich_help_panel=panels.OUTPUT,
    ),
]
WhatIfOption = Annotated[
    bool,
    typer.Option(
        "--what-if",
        help="Price the step with other links, devices, hosts, batches and strategies, too: "
        "what-if.json, and tables in the report.",
        rich_help_panel=panels.OUTPUT,
    ),
]
