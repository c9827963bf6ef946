"""Compile training steps for small clusters, check every file, and train them in this process.

Whatever goes through `compile_step` is checked: every segment by onnx.checker (compiling opens it), the
program by executing it with no memory between the ranks.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import onnx

from partc.compiler.compilation import Compilation
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import GraphOptions, Options
from partc.compiler.pipeline import compile_graph
from partc.compiler.verification.verify import VerifyReport, launch_in_process, verify
from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster
from partc.cost.cluster.machines import Device, Host, Link
from partc.cost.strategy import STRATEGY_FORMAT, Shard, Strategy, Synchronisation
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.errors import BadStrategy
from partc.runtime.plan.check_program import check_program
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.plan_json import encode_plan
from partc.runtime.plan.program import Aggregation, Plan
from tests.builders.graphs.foreign_steps import parse

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Compiled:
    """A compiled step: what the compiler knows of it, and its folder."""

    compilation: Compilation
    folder: PlanFolder

    @property
    def plan(self) -> Plan:
        return self.folder.plan

    @property
    def methods(self) -> dict[str, str]:
        return {variable.name: variable.method for variable in self.plan.variables}

    def started(self, kind: str) -> list[str]:
        """Return the labels of all communications of a kind."""
        starts = [i for i in self.plan.instructions if i.__class__.__name__ == "Start"]
        return [start.label for start in starts if start.kind == kind]


# ---------------------------------------------------------------- clusters


def cluster_of(shape: str) -> Cluster:
    """Return `hosts x workers`, such as 2x4, or each host's workers, such as 3+1.

    2x2s has its servers in processes of their own.
    """
    found = re.fullmatch(r"(?:(\d+)x(\d+)|([\d+]+))(s?)", shape)
    assert found is not None, shape
    separate = bool(found[4])
    workers = map(int, found[3].split("+")) if found[3] else [int(found[2])] * int(found[1])
    made = tuple(
        Host(f"host{h}", tuple(_device(h, w, separate) for w in range(count)), memory_bytes=2**32)
        for h, count in enumerate(workers)
    )
    links = tuple(Link((host.name, "switch"), bytes_per_s=125e6, latency_s=25e-6) for host in made)
    return Cluster(CLUSTER_FORMAT, shape, made, switches=("switch",), links=links)


def _device(host: int, worker: int, separate: bool) -> Device:
    if separate:
        return Device(f"host{host}/gpu{worker}", "gpu", "titan-xp", index=worker)
    return Device(f"host{host}/cpu{worker}", "cpu", "cpu-core")


def _on_cpus(folder: Path) -> None:
    """Let every rank compute on a CPU, so that plans for GPUs, with servers apart, run here."""
    plan = read_plan_folder(folder).plan
    ranks = tuple(msgspec.structs.replace(rank, kind="cpu", device_index=0) for rank in plan.ranks)
    (folder / "plan.json").write_bytes(encode_plan(msgspec.structs.replace(plan, ranks=ranks)))


# ---------------------------------------------------------------- compilation


def compile_step(
    training: TrainingGraph,
    out: Path,
    cluster: str = "2x2",
    strategy: str | Strategy = "auto",
    batch: str = "per-replica",
    sizes: Mapping[str, int] | None = None,
    without: Collection[str] = (),
    aggregation: Aggregation | None = None,
    recompute_bytes: int | None = None,
) -> Compiled:
    """Compile, and check all that is written."""
    options = Options(
        strategy=strategy,
        batch=batch,  # type: ignore[arg-type]
        sizes=sizes or {},
        without=frozenset(without),  # type: ignore[arg-type]
        aggregation=aggregation,
        recompute_bytes=recompute_bytes,
    )
    compilation = compile_graph(training, cluster_of(cluster), out, options)
    _on_cpus(out)
    folder = read_plan_folder(out)
    check_segments(folder)
    check_program(folder.plan)
    return Compiled(compilation, folder)


def compile_as_allowed(
    model: onnx.ModelProto,
    out: Path,
    cluster: str,
    strategy: Strategy,
    batch: str,
    recompute_bytes: int | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Compiled:
    """Compile; without the entries of operators whose split is refused beside what else there is to split."""
    while True:
        try:
            training = import_training_graph(model)
            return compile_step(
                training, out, cluster, strategy, batch, sizes, recompute_bytes=recompute_bytes
            )
        except BadStrategy as refused:
            found = re.match(r"ops\[(\d+)\]: split", refused.at)
            if found is None or not re.search("too few entries for|beside what else", refused.what):
                raise
            ops = tuple(op for number, op in enumerate(strategy.ops) if number != int(found[1]))
            strategy = msgspec.structs.replace(strategy, ops=ops)


def check_segments(folder: PlanFolder) -> None:
    """Check every segment with onnx.checker; compiling has opened it in onnxruntime."""
    segments = sorted((folder.path / "segments").glob("*.onnx"))
    assert segments
    for path in segments:
        onnx.checker.check_model(str(path), full_check=True)


def forced(methods: Mapping[str, str], rows: Mapping[str, int], hosts: int, batch: str) -> Strategy:
    """Return a strategy that gives each parameter a method; rows on servers are dealt out unevenly."""
    parameters = {
        name: Synchronisation(method, _uneven(rows[name], hosts) if method == "servers" else ())  # type: ignore[arg-type]
        for name, method in methods.items()
    }
    return Strategy(STRATEGY_FORMAT, batch, parameters)  # type: ignore[arg-type]


def _uneven(rows: int, hosts: int) -> tuple[Shard, ...]:
    """Cut rows in the ratio 1 : 2 : 3 : ..."""
    ends = [rows * host * (host + 1) // (hosts * (hosts + 1)) for host in range(hosts + 1)]
    shards = [Shard(f"host{h}", ends[h], ends[h + 1]) for h in range(hosts)]
    return tuple(shard for shard in shards if shard.stop > shard.start)


# ---------------------------------------------------------------- steps in ONNX text


def import_text(text: str, **options: object) -> TrainingGraph:
    """Import a step whose variables are the inputs X that have an output X_next.

    They begin at random, integers at zero.
    """
    model = parse(text)
    outputs = {info.name for info in model.graph.output}
    state = {i.name: f"{i.name}_next" for i in model.graph.input if f"{i.name}_next" in outputs}
    rng = np.random.default_rng(0)
    for info in model.graph.input:
        if info.name in state:
            value = _first_value(info, rng)
            model.graph.initializer.append(onnx.numpy_helper.from_array(value, info.name))
    return import_training_graph(model, GraphOptions(state=state, **options))  # type: ignore[arg-type]


def _first_value(info: onnx.ValueInfoProto, rng: np.random.Generator) -> np.ndarray:
    kind = info.type.tensor_type
    shape = [dim.dim_value for dim in kind.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    if dtype.kind != "f":
        return np.zeros(shape, dtype)
    return np.asarray(rng.normal(scale=0.5, size=shape)).astype(dtype)


# ---------------------------------------------------------------- data and verification


def random_batches(plan: Plan, steps: int, seed: int = 0, high: int | None = None) -> list[Batch]:
    """Return total batches; `high` bounds integers where it is lower than their range, so that ids
    collide often."""
    rng = np.random.default_rng(seed)
    return [
        {entry.name: _draw(plan, entry.name, rng, high) for entry in plan.data_inputs} for _ in range(steps)
    ]


def _draw(plan: Plan, name: str, rng: np.random.Generator, high: int | None) -> np.ndarray:
    entry = next(entry for entry in plan.data_inputs if entry.name == name)
    shape = [plan.sizes[size] if isinstance(size, str) else size for size in entry.shape]
    if entry.sample_axis is not None and plan.batch == "per-replica":
        shape[entry.sample_axis] *= plan.replicas
    if np.dtype(entry.dtype).kind in "iu":
        below = min(filter(None, (entry.high, high)), default=3)
        return rng.integers(0, below, shape).astype(entry.dtype)
    return np.asarray(rng.normal(size=shape)).astype(entry.dtype)


def verified(compiled: Compiled, batches: Sequence[Mapping[str, np.ndarray]]) -> VerifyReport:
    """Return verify's report, all ranks in this process."""
    return verify(compiled.folder, steps=len(batches), data=batches, launcher=launch_in_process)


def assert_trains_as_one_device(compiled: Compiled, batches: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Verify, and see that every variable moved."""
    report = verified(compiled, batches)
    assert report.passed, f"{report.summary()}\n{report.variables}\n{report.losses}"
    assert all(check.max_change > 0 for check in report.variables), report.variables
