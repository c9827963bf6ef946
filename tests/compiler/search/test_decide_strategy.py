"""`auto` on one batch for all: no name and no mode is quicker, what it takes trains."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.api import compile_step, decide_step, search
from partc.compiler.compilation import Compilation
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options, SearchOptions
from partc.compiler.planning import ahead
from partc.compiler.planning.ahead import Ahead
from partc.compiler.search import decide_strategy
from partc.compiler.search.rank_names import family_of
from partc.compiler.search.whole_steps import Priced, WholeSteps, names_for
from partc.compiler.verification.verify import launch_in_process, verify
from partc.cost.assignment.search_strategy import TIE
from partc.cost.cluster.cluster import Cluster, encode_cluster, read_cluster
from partc.cost.simulation.memory import DeviceMemory, memory_of
from partc.models.catalogue import build_model
from partc.runtime.errors import DoesNotFit, PartcError
from tests.builders.graphs.foreign_steps import parse
from tests.builders.graphs.random_steps import random_step
from tests.builders.plans.compiled_steps import cluster_of, random_batches
from tests.builders.plans.small_devices import small_devices
from tests.checks.command_line import done

GLOBAL = Options(batch="global")
EXAMPLES = Path(__file__).parents[3] / "examples"
MODES = ("allreduce", "ps", "hybrid")


@cache
def wide_mlp() -> onnx.ModelProto:
    """Return a step of so wide layers that four workers divide them in less time than one computes them."""
    forward = build_model("mlp", sizes=[512, 1024, 64], batch=8, dtype="float64")
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))


def compiled(
    step: onnx.ModelProto, cluster: Cluster, out: Path, strategy: str, options: Options = GLOBAL
) -> Compilation:
    return compile_step(step, cluster, out, replace(options, strategy=strategy))


def names_of(compilation: Compilation) -> tuple[str, ...]:
    return tuple(name for tried in compilation.compared for name in tried.names)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40))])
def test_no_mode_and_no_name_is_quicker(seed: int, tmp_path: Path) -> None:
    step, cluster = random_step(seed), cluster_of("2x2" if seed % 2 else "1x2")

    auto = compiled(step, cluster, tmp_path / "auto", "auto")

    hosts = [host.name for host in cluster.hosts for _ in host.devices]
    for name in (*MODES, *names_for(hosts)):
        try:
            step_s = compiled(step, cluster, tmp_path / name, name).timeline.step_s
        except PartcError:
            continue  # the step cannot be spread so
        assert auto.timeline.step_s <= step_s * (1 + TIE), name
        assert [tried.step_s for tried in auto.compared if name in tried.names] in ([], [step_s]), name


def test_wide_layers_are_split_and_train_as_one_device(tmp_path: Path) -> None:
    cluster = cluster_of("2x2")

    auto = compiled(wide_mlp(), cluster, tmp_path / "auto", "auto")

    taken = auto.compared[0].names[0]
    assert "tensor" in taken
    assert auto.timeline.step_s == auto.compared[0].step_s
    assert (
        auto.timeline.step_s < compiled(wide_mlp(), cluster, tmp_path / "data", "allreduce").timeline.step_s
    )
    batches = random_batches(auto.plan, 2, high=3)
    assert verify(tmp_path / "auto", steps=2, data=batches, launcher=launch_in_process).passed
    page = (tmp_path / "auto" / "report.html").read_text()
    assert f'{taken} <span class="tick">chosen</span>' in page


@pytest.mark.parametrize(("ways_end_first", "kinds_of_jobs"), [(False, 3), (True, 4)])
def test_a_second_core_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ways_end_first: bool, kinds_of_jobs: int
) -> None:
    """Whether names are priced while it searches Parallax's ways, or by turns with it after that."""
    step, cluster = wide_mlp(), cluster_of("2x2")
    alone = compiled(step, cluster, tmp_path / "alone", "auto")
    monkeypatch.setattr(ahead, "FORKED_NODES", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    begun: list[object] = []
    begin = Ahead.__init__

    def counted(self: Ahead[object], job: Callable[[], object], kind: type[object]) -> None:
        begun.append(kind)
        begin(self, job, kind)

    monkeypatch.setattr(Ahead, "__init__", counted)
    monkeypatch.setattr(Ahead, "is_done", ways_end_first)

    helped = compiled(step, cluster, tmp_path / "helped", "auto")

    assert len(set(begun)) == kinds_of_jobs  # ways, names, segments to be opened, and the report's graph
    assert alone.compared == helped.compared
    kinds = ("*.onnx", "report.html")
    files = [
        {p.name: p.read_bytes() for kind in kinds for p in (tmp_path / n).rglob(kind)}
        for n in ("alone", "helped")
    ]
    assert files[0] and files[0] == files[1]
    assert alone.plan.instructions == helped.plan.instructions


def test_a_second_core_changes_nothing_where_replicas_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compiled(wide_mlp(), cluster_of("1x4"), tmp_path / "whole", "tensor=4")
    fullest = max(need.certain_bytes for need in memory_of(whole.plan, cluster_of("1x4")))
    cluster = small_devices("1x4", fullest)
    alone = compiled(wide_mlp(), cluster, tmp_path / "alone", "auto")
    monkeypatch.setattr(ahead, "FORKED_NODES", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(Ahead, "is_done", False)

    helped = compiled(wide_mlp(), cluster, tmp_path / "helped", "auto")

    assert alone.compared == helped.compared
    assert alone.plan.instructions == helped.plan.instructions


def test_decisions_alone_are_the_same(tmp_path: Path) -> None:
    auto = compiled(wide_mlp(), cluster_of("2x2"), tmp_path / "auto", "auto")

    decided = decide_step(wide_mlp(), cluster_of("2x2"), tmp_path / "decided", replace(GLOBAL))

    assert decided == auto.strategy


def test_where_replicas_do_not_fit_the_quickest_name_that_fits_is_taken(tmp_path: Path) -> None:
    whole = compiled(wide_mlp(), cluster_of("1x4"), tmp_path / "whole", "allreduce")
    parted = compiled(wide_mlp(), cluster_of("1x4"), tmp_path / "parted", "tensor=4")
    fullest = max(need.certain_bytes for need in memory_of(parted.plan, cluster_of("1x4")))
    cluster = small_devices("1x4", fullest)
    assert fullest < min(need.certain_bytes for need in memory_of(whole.plan, cluster_of("1x4")))

    auto = compiled(wide_mlp(), cluster, tmp_path / "auto", "auto")

    assert max(need.certain_bytes for need in memory_of(auto.plan, cluster)) <= fullest
    assert all(auto.timeline.step_s <= tried.step_s for tried in auto.compared)
    with pytest.raises(DoesNotFit):
        compiled(wide_mlp(), cluster, tmp_path / "refused", "allreduce")


@cache
def deep_mlp() -> onnx.ModelProto:
    """Return a step of one weight, read by eight layers, and of many samples."""
    layers = "\n".join(
        f"a{n} = MatMul ({f'h{n - 1}' if n else 'x'}, W)\n h{n} = Tanh (a{n})" for n in range(8)
    )
    forward = parse(f"forward (double[64,16] x) => (double[64,16] h7) {{ {layers} }}")
    weight = np.random.default_rng(0).normal(size=(16, 16))
    forward.graph.initializer.append(onnx.numpy_helper.from_array(weight, "W"))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))


@pytest.mark.parametrize("hosts", ["1x1", "1x2"])
def test_where_nothing_else_fits_the_batch_passes_in_parts(
    hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_bytes(self: DeviceMemory) -> int:
        return self.variables_bytes + self.buffers_bytes + self.values_bytes + self.activations_bytes

    def needed_bytes(name: str) -> int:
        plan = compiled(deep_mlp(), cluster_of(hosts), tmp_path / name, name, each).plan
        return max(map(all_bytes, memory_of(plan, cluster_of(hosts))))

    each = Options(batch="per-replica")
    names = ("allreduce", "fsdp", "microbatches=2")
    limit_bytes = needed_bytes("microbatches=4")
    assert limit_bytes < min(map(needed_bytes, names))
    monkeypatch.setattr(DeviceMemory, "certain_bytes", property(all_bytes))  # activations count as well

    auto = compiled(deep_mlp(), small_devices(hosts, limit_bytes), tmp_path / "auto", "auto", each)

    assert (names_of(auto), auto.strategy.microbatches) == (("microbatches=4",), 4)
    batches = random_batches(auto.plan, 2, high=3)
    assert verify(tmp_path / "auto", steps=2, data=batches, launcher=launch_in_process).passed
    searched = replace(each, search=SearchOptions(budget_s=0.1))
    found = search(deep_mlp(), small_devices(hosts, limit_bytes), searched)
    assert found.data_parallel is None
    assert found.best.strategy.microbatches >= 4


@pytest.mark.parametrize(
    "options",
    [
        Options(batch="per-replica"),
        replace(GLOBAL, partitions=2),
        replace(GLOBAL, without=("local-aggregation",)),
    ],
)
def test_other_wishes_leave_data_parallelism(options: Options, tmp_path: Path) -> None:
    auto = compiled(wide_mlp(), cluster_of("2x2"), tmp_path / "auto", "auto", options)

    assert not auto.strategy.has_meshes
    assert not {"fsdp", "tensor=2"} & set(names_of(auto))


def test_so_many_names_are_tried_as_the_graph_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide_strategy, "_count_tried", lambda compilation: 0)

    auto = compiled(wide_mlp(), cluster_of("2x2"), tmp_path / "auto", "auto")

    ways = {"allreduce", "everything AllReduced", "hybrid", "ps", "busiest link"}
    named = [family_of(name) for name in names_of(auto) if name not in ways]
    assert "tensor=4" in names_of(auto)  # which promises most
    assert len(named) == len(set(named))  # one of each family


def test_the_command_line_says_what_was_compared(tmp_path: Path) -> None:
    onnx.save(wide_mlp(), tmp_path / "train.onnx")
    (tmp_path / "cluster.json").write_bytes(encode_cluster(cluster_of("2x2")))

    shown = done(
        "compile", tmp_path / "train.onnx", "-c", tmp_path / "cluster.json", "--batch", "global",
        "-o", tmp_path / "out",
    )  # fmt: skip

    told = re.search(r"strategy: (\S+), .* a step; compared: (.*)", shown)
    assert told and told[1].startswith("tensor=")
    assert "allreduce " in told[2]


LARGER: dict[str, tuple[dict[str, int], str]] = {
    "lm": ({"vocab": 500, "embedding": 32, "cells": 64, "projection": 32, "steps": 4, "samples": 64}, "loss"),
    "nmt": (
        {
            "source_vocab": 200,
            "target_vocab": 160,
            "cells": 16,
            "embedding": 16,
            "source_steps": 3,
            "target_steps": 3,
        },
        "loss",
    ),
    "flexflow_nmt": (
        {"source_vocab": 200, "target_vocab": 160, "embedding": 32, "cells": 32, "layers": 1, "steps": 2},
        "loss",
    ),
    "moe": ({"vocab": 200, "cells": 32, "steps": 3, "experts": 4, "chosen": 2, "expert_cells": 32}, "loss"),
    "alexnet": ({"classes": 100}, "softmax_cross_entropy"),
}
CANDIDATES = ("allreduce", "hybrid", "ps", "fsdp", "layerwise", "one-weird-trick", "tensor=", "pipeline=")


@pytest.mark.long
@pytest.mark.parametrize("hosts", ["2x2", "1x4", "3x2"])
@pytest.mark.parametrize("model", LARGER)
def test_no_candidate_that_is_compiled_by_itself_is_quicker(model: str, hosts: str, tmp_path: Path) -> None:
    sizes, loss = LARGER[model]
    forward = build_model(model, batch=12, **sizes)
    step, cluster = build_training_graph(forward, loss=loss, optimizer=SGD(0.1)), cluster_of(hosts)

    auto = compiled(step, cluster, tmp_path / "auto", "auto")

    workers = [host.name for host in cluster.hosts for _ in host.devices]
    names = [name for name in (*MODES, *names_for(workers)) if name.startswith(CANDIDATES)]
    steps_s = {}
    for name in (name for name in names if "," not in name):
        try:
            steps_s[name] = compiled(step, cluster, tmp_path / name, name).timeline.step_s
        except PartcError:
            continue  # the step cannot be spread so
    assert {"allreduce", "fsdp", "pipeline=2"} < steps_s.keys()
    assert auto.timeline.step_s <= min(steps_s.values()) * (1 + TIE), min(steps_s, key=steps_s.__getitem__)


@pytest.mark.long
@pytest.mark.parametrize("model", LARGER)
def test_no_name_that_is_priced_apart_is_quicker_on_48_devices(model: str, tmp_path: Path) -> None:
    sizes, loss = LARGER[model]
    step = build_training_graph(build_model(model, batch=96, **sizes), loss=loss, optimizer=SGD(0.1))
    cluster = read_cluster(EXAMPLES / "cluster-8x6-titanxp.json")

    auto = compiled(step, cluster, tmp_path / "auto", "auto")

    workers = [host.name for host in cluster.hosts for _ in host.devices]
    steps_s = {}
    apart = WholeSteps(lambda: import_training_graph(step), cluster, GLOBAL)  # read and analysed once
    for name in (*MODES, *names_for(workers)):
        if (priced := apart(name, name)) is not None:
            steps_s[name] = priced.step_s
    assert {"allreduce", "fsdp", "pipeline=2", "tensor=6"} < steps_s.keys()
    assert auto.timeline.step_s <= min(steps_s.values()) * (1 + TIE), min(steps_s, key=steps_s.__getitem__)


@pytest.mark.parametrize(("gain", "is_taken"), [(-0.01, False), (0.01, True)])
def test_a_name_is_taken_where_it_is_quicker(
    gain: float, is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compiled(wide_mlp(), cluster_of("2x2"), tmp_path / "whole", "allreduce").timeline.step_s
    price = WholeSteps.__call__

    def invented(self: WholeSteps, name: str, strategy: str) -> Priced | None:
        if name != "tensor=4":
            return None
        priced = price(self, name, strategy)
        return None if priced is None else replace(priced, step_s=whole / (1 + gain))

    monkeypatch.setattr(WholeSteps, "__call__", invented)

    auto = compiled(wide_mlp(), cluster_of("2x2"), tmp_path / "auto", "auto")

    assert auto.strategy.has_meshes == is_taken


def test_no_names_are_tried_on_many_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = compiled(wide_mlp(), cluster_of("2x2"), tmp_path / "few", "auto")
    monkeypatch.setattr(decide_strategy, "MANY_RANKS", 4)

    many = compiled(wide_mlp(), cluster_of("2x2"), tmp_path / "many", "auto")

    assert few.strategy.has_meshes
    assert not any(tried.strategy.has_meshes for tried in many.compared)


@pytest.mark.parametrize("hosts", [["a", "b"], ["a"] * 2 + ["b"] * 2, ["a"] * 6 + ["b"] * 6])
def test_names_that_are_tried_have_no_more_parts_than_workers(hosts: list[str]) -> None:
    names = list(names_for(hosts))

    for name in names:
        words = dict(word.split("=") for word in name.split(",") if "=" in word)
        workers = len(hosts) if list(words) == ["workers"] else int(words.pop("workers", len(hosts)))
        replicas = workers / np.prod([int(size) for size in words.values()])
        assert workers <= len(hosts), name
        assert replicas >= 1, name
        assert replicas == int(replicas), name
        assert replicas > 1 or "fsdp" not in name, name
    assert len(names) == len(set(names))
    assert {"fsdp", "tensor=2", "pipeline=2"} < set(names)
