"""What a strategy's file says of an operator is how it is laid out, or refused with the entry's number."""

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

from partc.compiler.compilation import Compilation
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import ANALYSIS, BATCH, GRADIENTS, run
from partc.compiler.stages import expand_split_operators
from partc.cost.strategy import MESH_STRATEGY_FORMAT, AxisSplit, OpConfig, Strategy
from partc.passes.analysis import Analysis
from partc.passes.distribute import lay_out, lay_out_strategy
from partc.passes.layouts.configuration import data_parallel
from partc.passes.layouts.laid_out_graph import LaidOutGraph
from partc.passes.layouts.layouts import MICROBATCHES, Layout, Replicate
from partc.runtime.errors import BadStrategy, InputError
from tests.builders.graphs.soap_models import MODELS, soap_model
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    cluster_of,
    compile_step,
    import_text,
    random_batches,
)
from tests.builders.plans.random_soap import random_soap
from tests.sampling import sampled

# Rows of times x samples, as recurrent networks have them before their logits.
TIMES = """
step (double[{times},{samples},4] x, double[4,6] W, double[6,2] V)
    => (double loss, double[4,6] W_next, double[6,2] V_next)
<int64[2] rows = {{-1, 4}}> {{
    flat = Reshape (x, rows)
    y = MatMul (flat, W)
    t = Tanh (y)
    z = MatMul (t, V)
    s = Tanh (z)
    loss = ReduceSum <keepdims = 0> (s)
    tt = Transpose <perm = [1, 0]> (t)
    dV = MatMul (tt, s)
    vt = Transpose <perm = [1, 0]> (V)
    dt = MatMul (s, vt)
    ft = Transpose <perm = [1, 0]> (flat)
    dW = MatMul (ft, dt)
    W_next = Sub (W, dW)
    V_next = Sub (V, dV)
}}
"""
GRID = {"data": 2, "tensor": 3}


def compiled(folder: Path, times: int, batch: str = "global", samples: int = 8, **fields: object) -> Compiled:
    training = import_text(TIMES.format(times=times, samples=samples), loss="loss", sample_axes={"x": 1})
    names = {node.outputs[0].name: node.name for node in training.graph.nodes}
    ops = tuple(msgspec.structs.replace(op, op=names.get(op.op, op.op)) for op in fields.pop("ops"))  # type: ignore[attr-defined]
    strategy = Strategy(MESH_STRATEGY_FORMAT, batch, {}, **{"ops": ops, "mesh": GRID, **fields})  # type: ignore[arg-type]
    return compile_step(training, folder / "out", "1x6", strategy, batch)


def layout_of(step: Compiled, tensor: str) -> Layout:
    return step.compilation.lowered.native[tensor]


@pytest.mark.parametrize("times", [3, 5])
def test_times_are_cut_where_samples_of_each_are(times: int, tmp_path: Path) -> None:
    step = compiled(tmp_path, times, ops=(OpConfig("y", {"batch": "data", "out:0": "tensor"}),))

    cuts = [(split.axis, split.outer, split.uneven) for _, split in layout_of(step, "y").splits()]
    assert cuts == [(0, times, 0), (0, 1, times % 3 and times)]
    assert_trains_as_one_device(step, random_batches(step.plan, 2))


def test_samples_are_cut_behind_an_operator_that_is_whole(tmp_path: Path) -> None:
    step = compiled(tmp_path, 3, ops=(OpConfig("y", {}), OpConfig("z", {"batch": "data"})))

    assert layout_of(step, "y").is_whole
    assert [split.outer for _, split in layout_of(step, "z").splits()] == [3]
    assert_trains_as_one_device(step, random_batches(step.plan, 2))


DEVICES = tuple(f"host0/cpu{number}" for number in range(6))


@pytest.mark.parametrize(
    ("fields", "what", "at"),
    [
        (
            {"ops": (OpConfig("y", {"batch": 2, "out:0": 3}, devices=DEVICES),)},
            "3 parts",
            "ops[0]: split: out:0",
        ),
        ({"batch": "per-replica", "ops": (OpConfig("y", {"out:1": "data"}),)}, "own batch", "split: out:1"),
        (
            {"ops": (OpConfig("y", {"out:1": 3}, devices=DEVICES[:3]), OpConfig("y", stage=0))},
            "runs where another entry says",
            "ops[0]: devices",
        ),
        (
            {"ops": (OpConfig("y", {"batch": 2}, devices=DEVICES[:2]), OpConfig("z", {"in:0:1": "tensor"}))},
            "to be divided along 'tensor'",
            "ops[1]: split: in:0:1",
        ),
        (
            {
                "ops": (OpConfig("y", {"batch": 2}, devices=DEVICES[:2]),),
                "variables": {"W": {"tensor": AxisSplit(1)}},
            },
            "to be divided along 'tensor'",
            "variables: W",
        ),
        (
            {
                "mesh": {},
                "ops": (
                    OpConfig("y", {"batch": 2}, devices=DEVICES[:2]),
                    OpConfig("z", {"in:0:1": 2}, devices=DEVICES[:2]),
                ),
                "variables": {"W": {"axis1": AxisSplit(1)}},
            },
            "to be divided along 'axis1'",
            "variables: W",
        ),
        (
            {"microbatches": 4, "ops": (OpConfig("y", {"batch": "data", "out:0/2": "tensor"}),)},
            "too few entries for 4 micro-batches",
            "ops[0]: split",
        ),
        (
            {"mesh": {}, "stages": 2, "ops": (OpConfig("y", {"batch": 2}, devices=DEVICES[:2]),)},
            "2 stages, but no mesh",
            "stages",
        ),
    ],
)
def test_what_cannot_be_held_is_refused(
    fields: dict[str, object], what: str, at: str, tmp_path: Path
) -> None:
    with pytest.raises(BadStrategy) as refusal:
        compiled(tmp_path, 2, **fields)  # type: ignore[arg-type]

    assert what in str(refusal.value)
    assert at in str(refusal.value)
    assert not (tmp_path / "out").exists()


def test_too_few_samples_are_refused_with_what_can_be(tmp_path: Path) -> None:
    six, two = OpConfig("y", {"batch": 6}, devices=DEVICES), OpConfig("z", {"batch": 2}, devices=DEVICES[:2])

    with pytest.raises(InputError, match=r"fix: .*--batch per-replica"):
        compiled(tmp_path, 2, mesh={}, samples=4, ops=(six,))
    with pytest.raises(InputError, match=r"fix: .*among 4 at most"):  # each replica divides its own alike
        compiled(tmp_path, 2, mesh={}, samples=4, ops=(six, two))
    compiled(tmp_path, 2, mesh={}, samples=4, ops=(six,), batch="per-replica")


def test_a_constant_cannot_be_split(tmp_path: Path) -> None:
    text = TIMES.replace(
        "t = Tanh (y)",
        "shape = Shape (y)\n    ones = ConstantOfShape (shape)\n    t0 = Tanh (y)\n"
        "    one = Cast <to = 11> (ones)\n    t = Add (t0, one)",
    )
    training = import_text(text.format(times=3, samples=8), loss="loss", sample_axes={"x": 1})
    name = next(node.name for node in training.graph.nodes if node.op == "ConstantOfShape")
    entry = OpConfig(name, {"out:1": "tensor"})
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh=GRID, ops=(entry,))

    with pytest.raises(BadStrategy, match="makes a constant") as refusal:
        compile_step(training, tmp_path / "out", "1x6", strategy, "global")

    assert "ops[0]: split: out:1" in str(refusal.value)


# ---------------------------------------------------------------- drawn


def laid_out(model: str, cluster: str, strategy: Strategy) -> tuple[Analysis, LaidOutGraph]:
    training = import_training_graph(onnx.ModelProto.FromString(soap_model(model)))
    compilation = Compilation(training, cluster_of(cluster), Options(strategy=strategy, batch=strategy.batch))
    run((GRADIENTS, BATCH, ANALYSIS), compilation)
    expand_split_operators(compilation)
    return compilation.analysis, lay_out_strategy(compilation.analysis, strategy)


def drawn(model: str, seed: int) -> tuple[str, Strategy]:
    batch = ("global", "per-replica")[seed % 2]
    training = import_training_graph(onnx.ModelProto.FromString(soap_model(model)))
    (size,) = {e.shape[e.sample_axis] for e in training.data_inputs.values() if e.sample_axis is not None}
    assert isinstance(size, int)
    return random_soap(training, batch, size, seed, are_equal=seed % 3 > 0, may_clash=True)


def check_held(model: str, seed: int) -> int:
    """Lay a draw out without the entries that are refused; return how many were."""
    cluster, strategy = drawn(model, seed)
    refused = 0
    while True:
        try:
            analysis, graph = laid_out(model, cluster, strategy)
        except BadStrategy as refusal:
            number = entry_of(refusal)
            rest = strategy.ops[:number] + strategy.ops[number + 1 :]
            strategy, refused = msgspec.structs.replace(strategy, ops=rest), refused + 1
            if not rest and not strategy.mesh:
                return refused  # every entry is, and there is no grid: nothing is left
            continue
        for node, wrong in not_as_asked(analysis, graph, strategy):
            raise AssertionError(f"{node}: {wrong}")
        assert not list(not_where_asked(analysis, graph, strategy))
        return refused


def entry_of(refusal: BadStrategy) -> int:
    """Return the number of the entry that cannot be held."""
    found = re.search(r"at:  ops\[(\d+)\]: split", str(refusal))
    assert found is not None, refusal
    return int(found[1])


def not_as_asked(analysis: Analysis, graph: LaidOutGraph, strategy: Strategy) -> Iterator[tuple[str, object]]:
    """Yield what is laid out otherwise than the words of a strategy say."""
    nodes = {node.name: node for node in graph.training.graph.nodes}
    entries = {config.op: config for config in strategy.ops if config.split is not None or config.devices}
    for config in entries.values():
        if config.op not in nodes:
            continue  # it is said in primitives
        decision = graph.decisions[config.op]
        mesh = graph.meshes.of(decision.site)
        workers = tuple(analysis.workers[number] for number in mesh.workers)
        if config.devices and workers != config.devices:
            yield config.op, workers
        asked, axes = asked_parts(analysis, config, dict(mesh.axes)), mesh.axes
        if not config.devices and "batch" in (config.split or {}) and not has_samples(analysis, config):
            axes = (("", 1), *axes[1:])  # along the first it is as its operands are
        for axis in range(len(graph.facts.shape(nodes[config.op].outputs[0].name))):
            if (found := parts_of(decision.outputs[0], axis, axes)) != asked.pop(("out", axis), 1):
                yield config.op, (axis, found, config)
        for (place, axis), parts in asked.items():
            if parts_of(decision.inputs[int(place[3:])], axis, axes) % parts:  # others may sum it too
                yield config.op, (place, axis, decision, config)
    for name, splits in strategy.variables.items():
        layout = graph.layout(name)
        found_at = {graph.meshes.of(layout.site).axes[a][0]: (s.axis, s.outer) for a, s in layout.splits()}
        if found_at != {a: (s.axis, s.outer) for a, s in splits.items() if strategy.mesh[a] > 1}:
            yield name, found_at


def not_where_asked(analysis: Analysis, graph: LaidOutGraph, strategy: Strategy) -> Iterator[object]:
    """Yield nodes that run elsewhere than at the stage of the last entry that places them, or all at once.

    At once: all micro-batches. Without a file's splits each runs micro-batch by micro-batch.
    """
    nodes = {node.name: node for node in graph.training.graph.nodes}
    placing = {config.op: config for config in strategy.ops if config.stage is not None or config.devices}
    for config in placing.values():
        if config.stage is not None and config.op in nodes and strategy.mesh:
            size = prod(strategy.mesh.values())
            at = graph.meshes.of(graph.decisions[config.op].site).workers
            if at != tuple(range(config.stage * size, (config.stage + 1) * size)):
                yield config, at
    axis = graph.meshes.microbatch_axis
    if axis is None:
        return
    alone = msgspec.structs.replace(
        strategy,
        mesh={"data": graph.meshes.replicas},
        devices=analysis.workers[: graph.meshes.replicas],
        stages=1,
        variables={},
        ops=(),
    )
    plain = lay_out_strategy(analysis, alone)
    along = plain.meshes.microbatch_axis
    assert along is not None
    for config in strategy.ops:
        if config.split and config.op in plain.decisions and is_divided(plain, config.op, along):
            inputs = [graph.layout(tensor.name).along(axis) for tensor in nodes[config.op].inputs]
            arrives = any(not isinstance(placement, Replicate) for placement in inputs)
            if arrives and not is_divided(graph, config.op, axis):
                yield config, inputs


def is_divided(graph: LaidOutGraph, node: str, axis: int) -> bool:
    axes = graph.decisions[node].axes
    return axis < len(axes) and not axes[axis].is_whole


def has_samples(analysis: Analysis, config: OpConfig) -> bool:
    alone = lay_out(analysis, {}, data_parallel(2)).decisions[config.op]
    return analysis.per_replica or not (alone.outputs[0].is_whole and all(i.is_whole for i in alone.inputs))


def asked_parts(analysis: Analysis, config: OpConfig, sizes: dict[str, int]) -> dict[tuple[str, int], int]:
    """Return ("out" or "in:I", axis) -> into how many parts ranks are to cut it, samples where these are.

    Under a batch per replica samples are not cut.
    """
    asked: dict[tuple[str, int], int] = {}
    for dimension, along in (config.split or {"batch": len(config.devices)}).items():
        parts = along if isinstance(along, int) else prod(sizes[name] for name in along.split("*"))
        place, _, axis = dimension.partition("/")[0].rpartition(":")
        places = [(place, int(axis))] if place else []
        if not place and parts > 1 and not analysis.per_replica:
            alone = lay_out(analysis, {}, data_parallel(parts)).decisions[config.op]
            places = [("out", split.axis) for _, split in alone.outputs[0].splits()]
        for found in places:
            asked[found] = asked.get(found, 1) * parts
    return asked


def parts_of(layout: Layout, axis: int, axes: tuple[tuple[str, int], ...]) -> int:
    """Return into how many parts ranks cut an axis: not micro-batches, nor replicas with a batch each."""
    along = zip(axes, layout.placements, strict=False)
    return prod(s for (name, s), how in along if getattr(how, "axis", None) == axis and name != MICROBATCHES)


@pytest.mark.parametrize(
    ("model", "seed"), sampled([(model, seed) for model in MODELS for seed in (10, 4)], range(0, 22, 2))
)
def test_operators_are_laid_out_as_asked(model: str, seed: int) -> None:
    check_held(model, seed)


def test_what_clashes_is_drawn() -> None:
    assert check_held("bert", 4) > 0


@pytest.mark.long
@pytest.mark.parametrize(("model", "seed"), [(model, seed) for model in MODELS for seed in range(60)])
def test_many_operators_are_laid_out_as_asked(model: str, seed: int) -> None:
    check_held(model, seed)


def check_blocks(seed: int, folder: Path) -> bool:
    """Draw parts of times, or of the samples of each, beside those of samples; tell if there is room."""
    rng = np.random.default_rng(seed)
    times, samples, parts = (int(number) for number in rng.integers(2, (8, 8, 4)))
    batch = int(rng.integers(1, 1 + min(samples, 6 // parts)))
    dimension = str(rng.choice(["out:0", f"out:0/{times}"]))
    has_room = samples >= batch * parts if dimension != "out:0" else batch == 1 or times >= parts
    entry = OpConfig("y", {"batch": batch, dimension: parts}, devices=DEVICES[: batch * parts])
    if not has_room:
        with pytest.raises(BadStrategy, match=r"ops\[0\]: split: out:0"):
            compiled(folder, times, samples=samples, ops=(entry,), mesh={})
        return False
    step = compiled(folder, times, samples=samples, ops=(entry,), mesh={})
    assert_trains_as_one_device(step, random_batches(step.plan, 2, seed))
    layout = layout_of(step, "y")
    assert parts_of(layout, 0, step.compilation.lowered.meshes.of(layout.site).axes) == batch * parts
    return True


def test_times_and_samples_of_any_numbers(tmp_path: Path) -> None:
    assert {check_blocks(seed, tmp_path / str(seed)) for seed in range(10)} == {True, False}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 200))
def test_times_and_samples_of_many_numbers(seed: int, tmp_path: Path) -> None:
    check_blocks(seed, tmp_path)
