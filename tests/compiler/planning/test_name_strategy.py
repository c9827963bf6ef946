"""Named strategies: what is split, what is sent, what a rank keeps; each trains as one device."""

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.planning.name_strategy import name_strategy
from partc.cost.named_strategy import NamedStrategy, parse_named
from partc.cost.strategy import Strategy, read_strategy
from partc.models.catalogue import build_model
from partc.runtime.errors import BadStrategy, BadUsage
from partc.runtime.plan.boxes import local_shape
from partc.runtime.plan.program import Start
from tests.builders.graphs.attention_block import POSITIONS, SAMPLES, SHAPES, WIDTH, attention_step
from tests.builders.graphs.training_models import training_model
from tests.builders.plans.compiled_steps import (
    Compiled,
    assert_trains_as_one_device,
    compile_step,
    random_batches,
)
from tests.passes.layouts.test_place_nodes import analysed
from tests.passes.search.stages.test_cut_stages import by_flops
from tests.sampling import sampled


def compiled_block(
    folder: Path, cluster: str, strategy: str | Strategy, batch: str = "global", **options: object
) -> Compiled:
    training = import_training_graph(attention_step(SGD(0.1), **options))
    return compile_step(training, folder / "out", cluster, strategy, batch)


def sent(compiled: Compiled, group: str) -> Counter[tuple[str, int]]:
    """Return (kind, payload bytes) of the communications of a group."""
    starts = [i for i in compiled.plan.instructions if isinstance(i, Start) and i.group == group]
    return Counter((start.kind, start.payload_bytes) for start in starts)


@pytest.mark.parametrize("parts", [2, 4])
def test_a_block_reduces_twice_forward_and_twice_back(parts: int, tmp_path: Path) -> None:
    compiled = compiled_block(tmp_path, f"1x{parts}", f"tensor={parts}")

    activations = SAMPLES * POSITIONS * WIDTH * 8
    found = sent(compiled, "worker.tensor")
    assert found[("all_reduce", activations)] == 3
    # Only what the first normalisation learns reads the last sum, and it sums samples first.
    assert found - Counter({("all_reduce", activations): 3}) == Counter({("all_reduce", 2 * WIDTH * 8): 1})


def test_columns_and_heads_then_rows(tmp_path: Path) -> None:
    variables = compiled_block(tmp_path, "1x2", "tensor=2").compilation.strategy.variables

    axes = {name: splits["tensor"].axis for name, splits in variables.items()}
    assert axes == {"Wq": 1, "Wk": 1, "Wv": 1, "Wo": 0, "W1": 1, "c1": 0, "W2": 0}


def test_a_rank_keeps_a_quarter_of_weights_and_slots(tmp_path: Path) -> None:
    training = import_training_graph(attention_step(Adam(0.01)))
    compiled = compile_step(training, tmp_path / "out", "1x4", "tensor=4", "global")

    shapes = {variable.name: variable.shape for variable in compiled.plan.variables}
    for rank in compiled.plan.ranks:
        for piece in rank.pieces:
            if piece.variable.split(".")[0] in ("Wq", "Wk", "Wv", "Wo", "W1", "W2"):
                assert 4 * prod(local_shape(shapes[piece.variable], piece.box)) == prod(
                    shapes[piece.variable]
                )


def test_replicas_that_share_variables_gather_and_scatter_each_once(tmp_path: Path) -> None:
    compiled = compiled_block(tmp_path, "2x2", "fsdp")

    shared = {name: prod(shape) * 8 for name, shape in SHAPES.items() if any(s % 4 == 0 for s in shape)}
    found = sent(compiled, "workers")
    scattered = sum(nbytes * count for (kind, nbytes), count in found.items() if kind == "reduce_scatter")
    gathered = sum(nbytes * count for (kind, nbytes), count in found.items() if kind == "all_gather")
    assert scattered == sum(shared.values())
    assert gathered == sum(shared.values())
    for rank in compiled.plan.ranks:
        for piece in rank.pieces:
            shape = SHAPES[piece.variable]
            assert 4 * prod(local_shape(shape, piece.box)) == prod(shape)


NAMED = (
    ("1x2", "data=2", "per-replica"),
    ("1x4", "tensor=4", "global"),
    ("2x2", "data=2,tensor=2", "per-replica"),
    ("2x2", "tensor=2,fsdp", "global"),
    ("2x4", "fsdp=4,tensor=2", "per-replica"),
    ("1x3", "fsdp", "global"),
)


@pytest.mark.parametrize(
    ("cluster", "strategy", "batch", "clip"),
    sampled([(*name, clip) for name, clip in product(NAMED, (None, 0.1))], (0, 3, 4, 5, 7, 8, 10)),
)
def test_a_named_strategy_trains_as_one_device(
    cluster: str, strategy: str | Strategy, batch: str, clip: float | None, tmp_path: Path
) -> None:
    if cluster == "1x3":
        training = import_training_graph(onnx.ModelProto.FromString(training_model("mlp, adagrad")))
        compiled = compile_step(training, tmp_path / "out", cluster, strategy, batch)
    else:
        compiled = compiled_block(tmp_path, cluster, strategy, batch, clip_global_norm=clip)

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, 2, high=3))


def test_a_name_is_written_as_an_ordinary_strategy(tmp_path: Path) -> None:
    named = compiled_block(tmp_path / "named", "2x2", "data=2,tensor=2")
    path = tmp_path / "strategy.json"
    path.write_bytes((named.folder.path / "strategy.json").read_bytes())

    again = compiled_block(tmp_path / "again", "2x2", read_strategy(path))

    assert read_strategy(path).mesh == {"data": 2, "tensor": 2}
    assert again.plan.instructions == named.plan.instructions
    assert [rank.pieces for rank in again.plan.ranks] == [rank.pieces for rank in named.plan.ranks]


@pytest.mark.parametrize(
    ("strategy", "error", "what"),
    [
        ("tensor=3", BadUsage, "does not make a grid of 4 workers"),
        ("data=2,tensor=4", BadUsage, "does not make a grid of 4 workers"),
        ("tensor", BadUsage, "no strategy 'tensor'"),
        ("tensor=two", BadUsage, "no strategy"),
        ("tensor=2,rows=2", BadUsage, "no strategy"),
        ("tensor=2,tensor=4", BadUsage, "two sizes of tensor"),
        ("data=2,data=2", BadUsage, "two sizes of data"),
        ("data=2,replicas=4", BadUsage, "two sizes of data"),
        ("replicas=3", BadUsage, "does not make a grid of 4 workers"),
        ("layerwise,tensor=2", BadUsage, "no strategy"),
        ("layerwise=2", BadUsage, "no strategy"),
        ("one-weird-trick=4", BadUsage, "no strategy"),
        ("one-weird-trick,fsdp", BadUsage, "no strategy"),
        ("layerwise,workers=2", BadUsage, "no strategy"),
        ("workers=3,tensor=2", BadUsage, "does not make a grid of 3 workers"),
        ("workers", BadUsage, "no strategy"),
        ("workers=0", BadUsage, "no strategy"),
        ("workers=5", BadUsage, "5 of 4 workers"),
    ],
)
def test_names_that_make_no_sense_are_refused(
    strategy: str, error: type[BadStrategy | BadUsage], what: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as refused:
        compiled_block(tmp_path, "2x2", strategy)

    assert what in refused.value.what
    assert refused.value.at
    assert refused.value.fix


def test_a_word_that_makes_no_sense_is_refused_with_the_words_that_there_are() -> None:
    with pytest.raises(BadUsage, match=r"fix: .*data=2, tensor=4.*with commas"):
        parse_named("workers=0")


def fix_of(named: NamedStrategy, workers: int) -> str:
    """Return how a refusal of a grid of so many workers is mended, nothing where there is none."""
    try:
        named.mesh(workers)
    except BadUsage as refusal:
        return refusal.fix
    return ""


def test_a_grid_that_cannot_be_is_refused_with_one_that_can() -> None:
    rng = np.random.default_rng(0)
    refused, idle = 0, 0
    for _ in range(500):
        workers = int(rng.integers(1, 13))
        text = ",".join(
            f"{word}={rng.integers(1, 9)}"
            for word in rng.permutation(
                ["data", "fsdp", "spatial", "tensor", "pipeline", "microbatches", "workers"]
            )[:4]
            if word != "data"
        )
        named = parse_named(text)
        assert named is not None
        fix = fix_of(named, workers)
        refused += bool(fix)
        idle += "idle" in fix
        for words in re.findall(r"--strategy ([^\s;]+)", fix):
            other = parse_named(words)
            assert other is not None
            assert prod(other.mesh(workers).values()) * other.stages == other.count_of(workers)
            assert (other.microbatches or 1, other.shards_variables) == (
                named.microbatches or 1,
                named.shards_variables,
            )
    assert refused > 100
    assert idle > 20


def test_other_words_are_no_named_strategy() -> None:
    assert parse_named("hybrid") is None
    assert parse_named("plans/strategy.json") is None


@pytest.mark.parametrize(
    ("text", "mesh", "stages"),
    [
        ("replicas=2", {"data": 2, "tensor": 4}, 1),
        ("replicas=2,pipeline=4", {"data": 2}, 4),
        ("replicas=2,tensor=2,pipeline=2", {"data": 2, "tensor": 2}, 2),
    ],
)
def test_replicas_share_their_workers_among_what_is_said(
    text: str, mesh: dict[str, int], stages: int
) -> None:
    named = parse_named(text)

    assert named is not None
    assert (named.mesh(8), named.stages) == (mesh, stages)


def test_layers_are_divided_among_the_devices_of_equal_hosts(tmp_path: Path) -> None:
    forward = build_model("mlp", sizes=[8, 8, 8, 8], batch=4)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))
    analysis = replace(analysed(step, tmp_path), workers=("a/0", "a/1", "b/0", "b/1"))
    named = parse_named("layerwise")
    assert named is not None

    def write(*hosts: str) -> Strategy:
        return name_strategy(analysis, named, hosts, "global", by_flops)

    assert named.replicas(("a", "a", "b", "b")) == 2
    devices = {config.devices for config in write("a", "a", "b", "b").ops}
    assert devices == {("a/0", "b/0"), ("a/1", "b/1")}
    with pytest.raises(BadUsage, match="hosts of 3, 1 devices"):
        write("a", "a", "a", "b")
