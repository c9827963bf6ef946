"""What a strategy's file says of a parameter's synchronisation is what the plan does, or is refused.

Looked at are who holds which rows, and what messages carry the gradient: not the method that the plan names.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import MESH_STRATEGY_FORMAT
from partc.passes.graph.training_graph import Gradient
from partc.runtime.errors import BadStrategy
from partc.runtime.plan.program import Plan, Start
from tests.builders.graphs.training_models import training_model
from tests.builders.plans.compiled_steps import (
    Compiled,
    cluster_of,
    compile_step,
    random_batches,
    verified,
)

STEPS = ("lm, sgd", "lm, momentum, time-major", "lm, adagrad, clipped", "mlp, adagrad", "tied embedding")
CLUSTERS = ("2x2", "2x2s", "3x1", "1x2")
METHODS = ("", "all_reduce", "all_gather", "servers", "servers in parts")
SHOWN = re.compile(r'write (?:the method )?"(\w+)"')


def drawn_parameters(
    shapes: dict[str, tuple[int, ...]], cluster: str, rng: np.random.Generator
) -> dict[str, dict[str, Any]]:
    hosts = [host.name for host in cluster_of(cluster).hosts]
    said: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        method = str(rng.choice(METHODS))
        if method == "servers in parts" and shape:
            owners = [host for host in hosts if rng.random() < 0.7] or hosts[-1:]
            owners = owners[: shape[0]]
            cuts = sorted(rng.choice(np.arange(1, shape[0]), len(owners) - 1, replace=False).tolist())
            rows = zip(owners, [0, *cuts], [*cuts, shape[0]], strict=True)
            shards = [{"host": host, "start": start, "stop": stop} for host, start, stop in rows]
            said[name] = {"method": "servers", "shards": shards}
        elif method:
            said[name] = {"method": method.partition(" ")[0]}
    return said


def check(step: str, seed: int, folder: Path) -> tuple[Compiled, int]:
    """Compile a draw, refused entries as their fixes say, and hold it to the file; tell how many were."""
    rng = np.random.default_rng(seed)
    cluster = str(rng.choice(CLUSTERS))
    batch = ("global", "per-replica")[seed % 2]
    read = import_training_graph(onnx.ModelProto.FromString(training_model(step)))
    gradients, shapes = dict(read.gradients), {n: read.variables[n].shape for n in read.gradients}
    said = drawn_parameters(shapes, cluster, rng)
    refused = 0
    while True:
        file = folder / "mine.json"
        file.write_text(json.dumps({"format": MESH_STRATEGY_FORMAT, "batch": batch, "parameters": said}))
        training = import_training_graph(onnx.ModelProto.FromString(training_model(step)))
        try:
            compiled = compile_step(training, folder / "out", cluster, str(file), batch)
            break
        except BadStrategy as refusal:
            said |= _as_the_fix_says(refusal)
            refused += 1
    for name, entry in said.items():
        _check_rows(compiled.plan, name, shapes[name], entry)
        assert _carried(compiled.plan, name, gradients[name]) == {entry["method"]}, (name, entry)
    assert {
        c.verdict for c in verified(compiled, random_batches(compiled.plan, 1, seed, high=3)).variables
    } == {"equal"}
    return compiled, refused


def _as_the_fix_says(refusal: BadStrategy) -> dict[str, dict[str, Any]]:
    found, methods = re.fullmatch(r"parameters: (.+): method", refusal.at), SHOWN.findall(refusal.fix)
    assert found and methods, refusal
    return {found[1]: {"method": methods[0]}}


def _check_rows(plan: Plan, name: str, shape: tuple[int, ...], entry: dict[str, Any]) -> None:
    holding = {
        rank.rank: (0, shape[0]) if piece.box is None and shape else piece.box and piece.box.ranges[0][0]
        for rank in plan.ranks
        for piece in rank.pieces
        if piece.variable == name
    }
    if entry["method"] != "servers":
        assert set(holding) == {rank.rank for rank in plan.ranks if rank.replica is not None}
        assert set(holding.values()) <= {(0, shape[0]) if shape else None}
        return
    hosts = {rank.rank: rank.host for rank in plan.ranks if "server" in rank.sites}
    rows = [(*own, hosts[rank]) for rank, own in holding.items() if own is not None]
    found = sorted((start, stop, host) for start, stop, host in rows if stop > start)
    said = [(shard["start"], shard["stop"], shard["host"]) for shard in entry.get("shards", ())]
    assert not said or found == said
    assert [start for start, _, _ in found[1:]] == [stop for _, stop, _ in found[:-1]]
    assert (found[0][0], found[-1][1]) == (0, shape[0])


def _carried(plan: Plan, name: str, gradient: Gradient) -> set[str]:
    """Return by what ways a gradient goes: to servers, in rows of all to everybody, or summed by all."""
    ways: set[str] = set()
    for start, tensors in _messages(plan):
        bases = {re.split(r"\.average|\.stacked|@|\.push", tensor)[0] for tensor in tensors}
        if any(tensor.startswith(f"{name}.push") for tensor in tensors):
            ways.add("servers")
        elif gradient.dense in bases:
            ways.add("servers" if start.receivers == "server" else "all_reduce")
        elif start.kind == "all_gather_rows" and gradient.rows in bases:
            ways.add("all_gather")
    return ways - {"all_reduce"} if "servers" in ways else ways or {"all_reduce"}


def _messages(plan: Plan) -> Iterator[tuple[Start, set[str]]]:
    for instruction in plan.instructions:
        if isinstance(instruction, Start):
            within = {s.value for s in plan.slices if s.buffer in instruction.reads}
            yield instruction, within | set(instruction.reads)


SAMPLED = [(step, seed) for step in STEPS for seed in range(1)]


@pytest.mark.parametrize(("step", "seed"), SAMPLED)
def test_parameters_are_synchronised_as_a_file_says(step: str, seed: int, tmp_path: Path) -> None:
    check(step, seed, tmp_path)


def test_what_cannot_be_is_refused_and_drawn(tmp_path: Path) -> None:
    compiled, refused = check("mlp, adagrad", 6, tmp_path)

    assert refused > 0
    assert "servers" in compiled.methods.values()


@pytest.mark.long
@pytest.mark.parametrize(("step", "seed"), [(step, seed) for step in STEPS for seed in range(1, 60)])
def test_many_parameters_are_synchronised_as_a_file_says(step: str, seed: int, tmp_path: Path) -> None:
    check(step, seed, tmp_path)
