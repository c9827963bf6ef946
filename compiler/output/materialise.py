"""Make one rank's segments where they are needed, from what was decided elsewhere.

    train.onnx, strategy.json, cluster.json ─ analyse, lower, cut ─> DIR/segments/*.onnx of one rank
    (and sparsity.json, where rows were measured: by what is on its way a step is ordered)

The transformation follows from the decisions alone: whoever carries it out writes the same bytes. So the
machine that decides need not transform for all others (parallax-abstract.txt, section 2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from partc.compiler.compilation import Compilation
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.model_files.model_file import MODEL
from partc.compiler.options import Options
from partc.compiler.output.output_paths import check_new_folder
from partc.compiler.output.plan_files import PlanFiles
from partc.compiler.pipeline import ANALYSIS, GRADIENTS, LOWERING_AS_DECIDED, SCHEDULE, run
from partc.compiler.planning.load_segments import load_segments
from partc.compiler.settle_options import fill_sizes
from partc.cost.cluster.cluster import Cluster, encode_cluster, read_any_cluster
from partc.cost.sparsity import SPARSITY, Sparsity, encode_sparsity, read_sparsity
from partc.cost.strategy import Strategy, encode_strategy, read_strategy
from partc.cost.strategy_check import check_strategy
from partc.passes.analysis import Analysis
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.roles.describe_parameters import describe_parameters
from partc.runtime.errors import BadPlan, BadStrategy, BadUsage
from partc.runtime.plan.plan_folder import sha256_of_file
from partc.runtime.plan.plan_json import decode_plan
from partc.runtime.plan.program import Plan, Run, instructions_of

STRATEGY, CLUSTER = "strategy.json", "cluster.json"


@dataclass(frozen=True)
class Decisions:
    """What a transformation follows from.

    `sizes`: a value for every symbolic size; `sparsity`: the rows that a step touches, if measured.
    """

    training: TrainingGraph
    strategy: Strategy
    cluster: Cluster
    sizes: Mapping[str, int]
    asynchronous: bool = False
    sparsity: Sparsity | None = None


def read_decisions(
    model: Path, strategy: Path, cluster: Path, sizes: Mapping[str, int], central: Plan | None
) -> Decisions:
    """Read what was decided; sizes and the way to train from `central`, the plan, if there is one.

    `strategy`: sparsity.json beside it is read, too. Raises PartcError.
    """
    training = import_training_graph(model, needs_initial=False)
    all_sizes = dict(central.sizes) if central is not None else fill_sizes(sizes, training)
    is_asynchronous = central is not None and bool(central.asynchronous)
    return Decisions(
        training,
        read_strategy(strategy),
        read_any_cluster(cluster),
        all_sizes,
        is_asynchronous,
        read_sparsity(strategy.with_name(SPARSITY)),
    )


def write_decisions(compilation: Compilation, out: Path) -> Strategy:
    """Write train.onnx, strategy.json and cluster.json into `out`, and sparsity.json if rows were measured.

    No segment is made.
    """
    strategy = compilation.strategy
    out.mkdir(parents=True, exist_ok=True)
    (out / MODEL).write_bytes(compilation.analysis.training.source)
    (out / STRATEGY).write_bytes(encode_strategy(strategy))
    (out / CLUSTER).write_bytes(encode_cluster(compilation.cluster))
    if compilation.sparsity is not None:
        (out / SPARSITY).write_bytes(encode_sparsity(compilation.sparsity))
    return strategy


def materialise(decisions: Decisions, rank: int, out: Path, central: Plan | None = None) -> tuple[str, ...]:
    """Write into `out` what one rank runs; return the files' paths below it.

    `central`: a plan that was compiled elsewhere from the same decisions, whose hashes these files must have.
    Raises BadUsage, BadPlan, DoesNotFit.
    """
    check_new_folder(out)
    strategy, batch = decisions.strategy, decisions.strategy.batch
    options = Options(
        strategy=strategy, batch=batch, sizes=decisions.sizes, asynchronous=decisions.asynchronous
    )
    compilation = Compilation(decisions.training, decisions.cluster, options)
    compilation.strategy, compilation.sparsity = strategy, decisions.sparsity
    run((GRADIENTS, ANALYSIS), compilation)
    _check_complete(strategy, compilation.analysis, compilation.machines)
    run((LOWERING_AS_DECIDED,), compilation)
    with PlanFiles(out) as files:
        compilation.files = files
        run((SCHEDULE,), compilation)
        plan = compilation.plan
        own = _files_of(plan, rank)
        for path in sorted(files.folder.rglob("*")):
            if path.is_file() and str(path.relative_to(files.folder)) not in own:
                path.unlink()
        load_segments(files.folder, plan, only=own)
        if central is not None:
            _compare(files.folder, own, central)
    return own


def _check_complete(strategy: Strategy, analysis: Analysis, machines: Cluster) -> None:
    """Refuse a strategy that fits no more than in part: nothing is decided here. Raises BadStrategy."""
    check_strategy(strategy, describe_parameters(analysis), machines)
    for name in analysis.training.gradients:
        how = strategy.parameters.get(name)
        if how is None or (how.method == "servers" and not how.shards):
            raise BadStrategy(
                "how it is synchronised is left open" if how is None else "nobody is said to own its rows",
                at=f"parameters: {name}",
                fix="take a strategy.json that `partc compile` wrote",
            )


def read_central_plan(path: Path) -> Plan:
    """Read a plan that was compiled elsewhere, without the files that it names. Raises BadPlan."""
    try:
        return decode_plan(path.read_bytes(), path)
    except OSError as error:
        what = f"no plan can be read: {error.strerror}"
        raise BadPlan(what, at=str(path), fix="give the plan.json that `partc compile` wrote") from error


def _files_of(plan: Plan, rank: int) -> tuple[str, ...]:
    """Return the segments that a rank runs."""
    if not 0 <= rank < len(plan.ranks):
        last = len(plan.ranks) - 1
        raise BadUsage(f"no rank {rank}", at="--rank", fix=f"give a number from 0 to {last}")
    rank_entry = next(r for r in plan.ranks if r.rank == rank)
    return tuple(sorted({i.segment for i in instructions_of(plan, rank_entry) if isinstance(i, Run)}))


def _compare(folder: Path, own: tuple[str, ...], central: Plan) -> None:
    for name in own:
        if central.files.get(name) != sha256_of_file(folder / name):
            raise BadPlan(
                "this rank makes another file than the plan names",
                at=name,
                fix="take train.onnx, cluster.json, strategy.json and any sparsity.json from the plan's own "
                "folder, and the same version of partc",
            )
