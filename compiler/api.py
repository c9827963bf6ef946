"""What the command line does, as functions of Python."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack, get_args

import onnx

from partc.compiler.arguments import choose_batch, fill_sizes, read_strategy_option
from partc.compiler.asynchronous import strategy_of_sessions
from partc.compiler.choose_partitions import Partitioner, get_partitioner, measure_partitions, quickest
from partc.compiler.choose_reading import describe_departures, judge_step
from partc.compiler.driver import Compilation, CompileOptions, compile_graph
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.inspect import Inspection, inspect_graph
from partc.compiler.materialise import write_decisions
from partc.compiler.measure_sparsity import Sample, measure_sparsity
from partc.compiler.output_paths import check_output_folder
from partc.compiler.training.build import build_training_graph
from partc.compiler.verification.verify import verify
from partc.cost.cluster import Cluster, read_any_cluster
from partc.cost.partitions import check_partitions
from partc.cost.strategy import Batch, Mechanism, Strategy
from partc.cost.synchronisation import Mode
from partc.passes.analysis.count_flops import count_flops
from partc.passes.analysis.find_gradients import find_gradients
from partc.passes.training_graph import TrainingGraph
from partc.runtime.errors import (
    BadCluster,
    BadModel,
    BadStrategy,
    BadUsage,
    NoPlacement,
    UnsupportedModel,
    naming,
)
from partc.runtime.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.program import Aggregation

ABOUT_THE_MODEL = (BadModel, UnsupportedModel, BadUsage)

__all__ = ["build_training_graph", "compile", "get_partitioner", "inspect", "verify"]


@dataclass(frozen=True)
class GraphOptions:
    """What a training graph's file does not say: see `import_training_graph`."""

    state: dict[str, str] | None = None
    sample_axes: dict[str, int | None] | None = None
    loss: str | None = None
    initial: Path | None = None

    def read(self, train: str | Path | onnx.ModelProto) -> TrainingGraph:
        """Import a training graph."""
        with naming(train, *ABOUT_THE_MODEL):
            return import_training_graph(
                train,
                state=self.state,
                sample_axes=self.sample_axes,
                loss=self.loss,
                initial=self.initial,
            )


class StepOptions(TypedDict, total=False):
    """How a training step is compiled; every key may be missing.

    strategy      auto (the default), hybrid, allreduce, ps, the path of a strategy.json, or a Strategy
    batch         what the graph's batch is: one replica's (per-replica), or the whole (global); None: one
                  replica's where that is proven to train as one device does, else the whole
    sizes         symbolic size -> value, for pricing and synthetic data
    options       what the training graph's file does not say
    sample        data to measure sparsity from
    partitions    of large variables on servers: a number, or a partitioner; None as balance wants
    without       mechanisms that are switched off (local-aggregation, post-aggregation, boundary-ops)
    asynchronous  workers push and pull without waiting for each other (docs/asynchronous.md)
    aggregation   whether gradients are averaged or summed, and which of them are outputs of the step
    recompute     bytes that a step's values may take at once: what does not fit is computed again
    force         trained variables of an earlier plan in the output folder may go
    """

    strategy: str | Strategy
    batch: Batch | None
    sizes: Mapping[str, int] | None
    options: GraphOptions | None
    sample: Sample | None
    partitions: Partitioner | int | None
    without: Collection[Mechanism]
    asynchronous: bool
    aggregation: Aggregation | None
    recompute: int | None
    force: bool


def compile_step(
    train: str | Path | onnx.ModelProto,
    cluster: str | Path | Cluster,
    out: str | Path,
    **asked: Unpack[StepOptions],
) -> Compilation:
    """Compile a training step for a cluster into the folder `out`. `asked`: see StepOptions.

    Raises PartcError.
    """
    check_output_folder(Path(out), asked.get("force", False))
    machines = cluster if isinstance(cluster, Cluster) else read_any_cluster(Path(cluster))
    partitions = asked.get("partitions")
    if isinstance(partitions, Partitioner) and partitions.search == "measured":

        def compile_with(count: int, folder: Path) -> PlanFolder:
            tried = asked.copy()
            tried["partitions"] = count
            compile_step(train, machines, folder, **tried)
            return read_plan_folder(folder)

        asked["partitions"] = _measured_partitions(partitions, machines, compile_with)
    graph = (asked.get("options") or GraphOptions()).read(train)
    with _naming_files(train, cluster, asked):
        return compile_graph(graph, machines, Path(out), _choices(graph, asked))


def decide_step(
    train: str | Path | onnx.ModelProto,
    cluster: str | Path | Cluster,
    out: str | Path,
    **asked: Unpack[StepOptions],
) -> Strategy:
    """Decide as `compile_step` does, and write the decisions alone into `out`. Raises PartcError.

    From them `partc executor --materialise` makes any rank's segments.
    """
    partitions, asynchronous = asked.get("partitions"), asked.get("asynchronous", False)
    if asynchronous or (isinstance(partitions, Partitioner) and partitions.search == "measured"):
        other = "--asynchronous" if asynchronous else "--search-partitions measured"
        raise BadUsage(
            "a strategy file cannot say this, or not before anything ran",
            at=f"--decisions-only with {other}",
            fix="leave one of the two out",
        )
    machines = cluster if isinstance(cluster, Cluster) else read_any_cluster(Path(cluster))
    graph = (asked.get("options") or GraphOptions()).read(train)
    with _naming_files(train, cluster, asked):
        return write_decisions(graph, machines, Path(out), _choices(graph, asked))


def compile(
    train: str | Path | onnx.ModelProto,
    cluster: str | Path | Cluster,
    out: str | Path,
    **asked: Unpack[StepOptions],
) -> PlanFolder:
    """Compile as `compile_step` does, and return the plan and its folder, as Runner takes it."""
    compile_step(train, cluster, out, **asked)
    return read_plan_folder(out)


@contextmanager
def _naming_files(
    train: str | Path | onnx.ModelProto, cluster: str | Path | Cluster, asked: StepOptions
) -> Iterator[None]:
    """Let every refusal name the file that it is about."""
    strategy = asked.get("strategy")
    of_strategy = () if strategy in get_args(Mode) else (BadStrategy,)
    with (
        naming(train, *ABOUT_THE_MODEL),
        naming(cluster, BadCluster, NoPlacement),
        naming(strategy, *of_strategy),
    ):
        yield


def _choices(graph: TrainingGraph, asked: StepOptions) -> CompileOptions:
    """Return the options as the compiler takes them. Raises BadUsage, BadStrategy."""
    strategy = asked.get("strategy", "auto")
    chosen = strategy if isinstance(strategy, Strategy) else read_strategy_option(strategy)
    batch = choose_batch(asked.get("batch"), chosen)
    asynchronous = asked.get("asynchronous", False)
    return CompileOptions(
        strategy=strategy_of_sessions(chosen, batch) if asynchronous else chosen,
        batch=batch,
        sizes=fill_sizes(asked.get("sizes") or {}, graph),
        sample=asked.get("sample"),
        partitions=asked.get("partitions"),
        without=frozenset(asked.get("without", ())),
        asynchronous=asynchronous,
        aggregation=asked.get("aggregation"),
        recompute_bytes=asked.get("recompute"),
        force=asked.get("force", False),
    )


def _measured_partitions(
    partitioner: Partitioner, cluster: Cluster, compile_with: Callable[[int, Path], PlanFolder]
) -> int:
    """Return the number of partitions that trains quickest, of all that are allowed."""
    most = check_partitions(cluster, partitioner.min_partitions)
    return quickest(measure_partitions(range(partitioner.min_partitions, most + 1), compile_with))


def inspect(
    train: str | Path | onnx.ModelProto,
    *,
    sizes: Mapping[str, int] | None = None,
    options: GraphOptions | None = None,
    sample: Sample | None = None,
) -> Inspection:
    """Look at a training step: variables, gradients, data inputs, work. Raises PartcError.

    `sample`: data from which the rows that a step of one replica touches are measured.
    """
    graph = (options or GraphOptions()).read(train)
    with naming(train, *ABOUT_THE_MODEL):
        find_gradients(graph)
        known = fill_sizes(sizes or {}, graph)
        sparsity = measure_sparsity(graph, sample, known, "per-replica", {1}) if sample else None
        departures = describe_departures(judge_step(graph, known))
        return inspect_graph(graph, count_flops(graph, known), sparsity, departures)
