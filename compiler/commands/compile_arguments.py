"""The arguments that `partc compile` alone has."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from partc.compiler.options import SearchMethod, SearchMode
from partc.cost.strategy import Batch

ClusterFile = Annotated[Path, typer.Option("-c", "--cluster", help="cluster.json, or a resource file.")]
StrategyName = Annotated[
    str,
    typer.Option(
        help="auto, hybrid, allreduce, ps, search, placed, data=N, tensor=K, fsdp, or a strategy.json."
    ),
]
SearchBudget = Annotated[str, typer.Option(help="How long to search, such as 60s or 5min.")]
SearchSeed = Annotated[int, typer.Option(help="The seed of what a search tries.")]
SearchMethodName = Annotated[
    SearchMethod, typer.Option(help="How to search: docs/search.md tells which method is for what.")
]
SearchProposals = Annotated[
    int | None,
    typer.Option(
        help="How many configurations of operators a search tries, in place of --budget: the same on every "
        "machine.",
        min=1,
    ),
]
BatchReadingName = Annotated[
    Batch | None,
    typer.Option(
        help="What the graph's batch is: one replica's, or the whole. Left out: one replica's where that "
        "is proven to train what one device trains, else the whole."
    ),
]
PartitionSearchMode = Annotated[
    SearchMode | None,
    typer.Option(
        help="Choose the partitions of large variables on servers: by the cost model, or by short runs; "
        "off takes the minimum."
    ),
]
MinPartitions = Annotated[int, typer.Option(help="The fewest partitions to consider.")]
DisabledMechanisms = Annotated[
    list[str],
    typer.Option(
        help="Switch a mechanism off: local-aggregation, post-aggregation or boundary-ops; repeatable."
    ),
]
Asynchronous = Annotated[
    bool,
    typer.Option(
        "--asynchronous",
        help="Workers push and pull without waiting for each other: not what one device trains.",
    ),
]
SumDense = Annotated[bool, typer.Option("--sum-dense", help="Sum dense gradients over replicas: no average.")]
SumSparse = Annotated[
    bool, typer.Option("--sum-sparse", help="Sum sparse gradients over replicas: no average.")
]
FetchGradients = Annotated[
    str, typer.Option(help="Parameters NAME,... whose aggregated gradients are outputs: NAME.aggregated.")
]
RecomputeSize = Annotated[
    str,
    typer.Option(
        help="SIZE, such as 800MB, that a step's values may take at once: others are computed again.",
        metavar="SIZE",
    ),
]
RoundSums = Annotated[
    Literal["float16", "bfloat16"] | None,
    typer.Option(
        help="Round dense gradients to 16 bits before they are sent, sum them in float32: half the bytes, "
        "not what one device trains.",
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace trained variables that lie in the output folder.")
]
ProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        help="Kernels as `partc profile` measured them: prices are made of these, and of rooflines for "
        "others.",
        metavar="PROFILE.json",
    ),
]
DecisionsOnly = Annotated[
    bool,
    typer.Option(
        "--decisions-only",
        help="Write train.onnx, strategy.json and cluster.json, from which ranks make their segments.",
    ),
]
WhatIfOption = Annotated[
    bool,
    typer.Option(
        "--what-if",
        help="Price the step with other links, devices, hosts, batches and strategies, too: what-if.json, and a "
        "table in the report.",
    ),
]
