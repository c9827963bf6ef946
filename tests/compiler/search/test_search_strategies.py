"""What a search finds compiles to its price, trains as one device, and is no slower than any name."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import pytest

from partc.compiler.api import compile_step, search
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options, SearchMethod, SearchOptions
from partc.compiler.search import search_strategies
from partc.compiler.search.operators.walk_tasks import TaskWalk
from partc.compiler.search.search_strategies import SearchResult
from partc.compiler.search.whole_steps import Priced, WholeSteps, names_for
from partc.compiler.verification.verify import launch_in_process, verify
from partc.cost.cluster.cluster import encode_cluster
from partc.cost.simulation.memory import memory_of
from partc.cost.strategy import read_strategy
from partc.models.catalogue import build_model
from partc.runtime.errors import BadUsage, DoesNotFit, UnsupportedModel
from tests.builders.graphs.foreign_steps import parse
from tests.builders.plans.compiled_steps import cluster_of, random_batches
from tests.builders.plans.small_devices import small_devices
from tests.checks.command_line import done, partc
from tests.compiler.search.pipelines.test_step_pipelines import uneven_mlp
from tests.sampling import sampled

FORWARD = """
forward (double[8,96] x) => (double[8,4] logits) {
    a = MatMul (x, W1)
    r = Tanh (a)
    logits = MatMul (r, W2)
}
"""
SHAPES = {"W1": (96, 768), "W2": (768, 4)}  # so wide that replicas of it are slow
GLOBAL = Options(batch="global")


ALL_NAMES = replace(GLOBAL, search=SearchOptions(proposals=1))  # a clock has no part in it


def searching(budget_s: float, method: SearchMethod = "auto", options: Options = GLOBAL) -> Options:
    return replace(options, search=SearchOptions(budget_s, method=method))


@cache
def wide_mlp() -> onnx.ModelProto:
    forward = parse(FORWARD)
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        forward.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape), name))
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))


def data_parallel_s(found: SearchResult) -> float:
    assert found.data_parallel is not None, "it fits"
    return found.data_parallel.step_s


def test_what_is_found_compiles_to_its_price_and_trains_as_one_device(tmp_path: Path) -> None:
    found = search(wide_mlp(), cluster_of("2x2"), searching(8.0))

    compiled = compile_step(
        wide_mlp(), cluster_of("2x2"), tmp_path / "out", replace(GLOBAL, strategy=found.best.strategy)
    )

    assert compiled.timeline.step_s == found.best.step_s
    assert found.best.step_s < data_parallel_s(found) / 2, "weights are large, activations small"
    batches = random_batches(compiled.plan, 2, high=4)
    report = verify(tmp_path / "out", steps=2, data=batches, launcher=launch_in_process)
    assert {check.verdict for check in report.variables} == {"equal"}


@pytest.mark.parametrize("name", ["auto", "allreduce", "ps", "fsdp", "tensor=2", "tensor=4", "pipeline=2"])
def test_no_name_is_quicker(name: str, tmp_path: Path, found_by_names: Priced) -> None:
    compiled = compile_step(wide_mlp(), cluster_of("2x2"), tmp_path / "out", replace(GLOBAL, strategy=name))

    assert found_by_names.step_s <= compiled.timeline.step_s


@pytest.fixture(scope="module", autouse=True)
def all_names_are_tried() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_strategies, "NAMED_SHARE", 1e9)
        yield


@pytest.fixture(scope="module")
def found_by_names() -> Priced:
    return search(wide_mlp(), cluster_of("2x2"), ALL_NAMES).best


def test_a_batch_per_replica_keeps_its_replicas() -> None:
    found = search(wide_mlp(), cluster_of("1x2"), searching(4.0, options=Options(batch="per-replica")))

    mesh = found.best.strategy.mesh
    assert not mesh or mesh["data"] == 2, "tensor=2 has one replica, and half the samples"
    assert found.best.strategy.batch == "per-replica"


@cache
def found_by(method: SearchMethod) -> SearchResult:
    """Return what a method finds in some proposals: in no time, so that it is the same everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_strategies, "names_for", lambda hosts: ["tensor=4"])
        asked = SearchOptions(method=method, proposals=300, seed=4)
        return search(wide_mlp(), cluster_of("2x2"), replace(GLOBAL, search=asked))


@pytest.mark.parametrize("method", ["mcmc", "ilp", "dp", "exhaustive", "auto"])
def test_every_method_finds_what_compiles_to_its_price(method: SearchMethod, tmp_path: Path) -> None:
    found = found_by(method)
    options = replace(GLOBAL, strategy=found.best.strategy)

    assert found.best.step_s < data_parallel_s(found) / 2
    assert compile_step(wide_mlp(), cluster_of("2x2"), tmp_path, options).timeline.step_s == found.best.step_s


def test_auto_finds_the_quickest_state_and_says_that_it_is_proven() -> None:
    exhausted, found = found_by("exhaustive"), found_by("auto")

    assert found.best.step_s <= exhausted.best.step_s
    for each in (exhausted, found):
        assert "proven to be no quicker" in " ".join(each.remarks)
    assert exhausted.remarks[1:] == (
        "every change of one operator, or kind, was tried: none is quicker by the task graph",
    )


@cache
def unequal_mlp() -> onnx.ModelProto:
    """Return a step whose quickest plan is not what the task graph calls quickest."""
    forward = build_model("mlp", sizes=[1024, 2048, 64], batch=32)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))


@pytest.mark.parametrize("method", sampled(["exhaustive", "ilp", "dp"], range(1)))
def test_single_changes_are_tried_as_whole_plans(
    method: SearchMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_strategies, "names_for", lambda hosts: [])
    named = compile_step(
        unequal_mlp(), cluster_of("2x2"), tmp_path / "out", replace(GLOBAL, strategy="tensor=4")
    )
    asked = SearchOptions(method=method, proposals=3000)

    found = search(unequal_mlp(), cluster_of("2x2"), replace(GLOBAL, search=asked))

    assert found.best.step_s <= named.timeline.step_s
    assert found.remarks[-1] == "each such change was priced as a whole plan, too: none is quicker"


def test_names_are_tried_by_every_method(tmp_path: Path) -> None:
    """Three workers share no samples or weights evenly, as what is exhausted would have it."""
    named = compile_step(
        unequal_mlp(), cluster_of("1x3"), tmp_path / "out", replace(GLOBAL, strategy="tensor=3")
    )
    asked = SearchOptions(method="exhaustive", proposals=20)

    found = search(unequal_mlp(), cluster_of("1x3"), replace(GLOBAL, search=asked))

    assert found.best.step_s <= named.timeline.step_s


def test_what_a_sum_is_bounded_by_is_said_of_the_sum() -> None:
    remark, *_ = found_by("ilp").remarks
    assert "none is below" in remark
    assert "a bound of this sum, of no step" in remark
    remark, *_ = found_by("dp").remarks
    assert "it is no step's" in remark


@pytest.mark.parametrize("method", ["mcmc", pytest.param("auto", marks=pytest.mark.long)])
def test_equal_seeds_and_proposals_find_alike(method: SearchMethod) -> None:
    first = found_by(method)
    found_by.cache_clear()
    again = found_by(method)

    assert (again.best, again.proposals, again.remarks) == (first.best, first.proposals, first.remarks)


@pytest.mark.parametrize("seed", [-5, 2**31])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    asked = SearchOptions(method="ilp", proposals=20, seed=seed)

    found = search(wide_mlp(), cluster_of("1x2"), replace(GLOBAL, search=asked))

    assert found.best.step_s <= data_parallel_s(found)


def test_methods_without_a_choice_are_refused() -> None:
    per_replica = Options(batch="per-replica")

    with pytest.raises(BadUsage, match="leaves operators nothing to choose"):
        search(wide_mlp(), cluster_of("1x2"), searching(1.0, "exhaustive", per_replica))


def scaled() -> onnx.ModelProto:
    """Return a step that sums no products: its loss scales the data, column by column."""
    forward = parse(
        "f (double[8,6] x) => (double loss) { y = Mul (x, W) loss = ReduceMean <keepdims = 0> (y) }"
    )
    forward.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(6), "W"))
    chosen = ParameterChoice(train=("W",))
    return build_training_graph(forward, loss="loss", optimizer=Adam(), parameters=chosen)


def test_a_step_without_operators_of_their_own_is_refused_for_that(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="no operator sums products") as refusal:
        search(scaled(), cluster_of("1x2"), searching(1.0, "exhaustive"))
    assert refusal.value.fix == "leave --method out"

    placed = Options(batch="global", strategy="placed")
    with pytest.raises(BadUsage, match="no operator sums products"):
        compile_step(scaled(), cluster_of("1x2"), tmp_path / "out", placed)


@pytest.mark.parametrize("number", sampled([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], range(2)))
def test_signals_keep_the_best(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    price, priced = WholeSteps.__call__, dict[str, Priced | None]()

    def interrupted(self: WholeSteps, name: str, strategy: object) -> Priced | None:
        if len(priced) == 3:
            os.kill(os.getpid(), number)
        priced[name] = price(self, name, strategy)  # type: ignore[arg-type]
        return priced[name]

    monkeypatch.setattr(WholeSteps, "__call__", interrupted)
    train, cluster, out = (tmp_path / name for name in ("train.onnx", "cluster.json", "strategy.json"))
    onnx.save(wide_mlp(), train)
    cluster.write_bytes(encode_cluster(cluster_of("2x2")))

    before = signal.signal(
        number, signal.default_int_handler
    )  # what is ignored from the start stays so, as under nohup
    try:
        said = done("search", train, "-c", cluster, "--batch", "global", "-o", out)
    finally:
        signal.signal(number, before)

    assert f"{_quickest(priced.values()).name}: " in said
    assert "3\N{NO-BREAK SPACE}strategies priced" in said
    assert "it was interrupted" in said
    assert read_strategy(out).has_meshes


def _quickest(priced: Iterable[Priced | None]) -> Priced:
    return min((each for each in priced if each is not None), key=lambda each: each.step_s)


def test_what_is_under_way_when_the_budget_is_spent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    price, priced = WholeSteps.__call__, dict[str, Priced | None]()

    def slow(self: WholeSteps, name: str, strategy: object) -> Priced | None:
        if len(priced) == 3:
            time.sleep(60.0)
            raise AssertionError("it was waited for")
        priced[name] = price(self, name, strategy)  # type: ignore[arg-type]
        return priced[name]

    monkeypatch.setattr(WholeSteps, "__call__", slow)

    found = search(wide_mlp(), cluster_of("2x2"), searching(4.0))

    assert (found.best, found.priced) == (_quickest(priced.values()), 3)
    assert "what was under way when the budget was spent was given up" in found.remarks


def test_ctrl_c_prices_the_best_that_walks_have_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    price, advance, names = WholeSteps.__call__, TaskWalk.advance, []

    def noted(self: WholeSteps, name: str, strategy: object) -> Priced | None:
        names.append(name)
        return price(self, name, strategy)  # type: ignore[arg-type]

    def interrupted(self: TaskWalk, *arguments: object) -> None:
        advance(self, *arguments)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(WholeSteps, "__call__", noted)
    monkeypatch.setattr(TaskWalk, "advance", interrupted)
    options = replace(GLOBAL, search=SearchOptions(method="mcmc", proposals=100))

    found = search(wide_mlp(), cluster_of("2x2"), options)

    assert "it was interrupted" in found.remarks
    assert names[-1].startswith("operators' own")
    assert found.best.step_s <= found.data_parallel.step_s


def test_what_data_parallelism_is_refused_with_is_raised() -> None:
    forward = parse(FORWARD.replace("8,", "7,"))
    for name, shape in SHAPES.items():
        forward.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(shape), name))
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam(0.01))

    with pytest.raises(UnsupportedModel, match="batch of 7"):
        search(step, cluster_of("2x4"), searching(1.0))


def test_compile_searches_where_that_is_asked_for(tmp_path: Path) -> None:
    compiled = compile_step(
        wide_mlp(), cluster_of("2x2"), tmp_path / "out", replace(ALL_NAMES, strategy="search")
    )

    assert compiled.strategy.has_meshes
    with pytest.raises(BadUsage, match="do not wait"):
        compile_step(
            wide_mlp(),
            cluster_of("2x2"),
            tmp_path / "other",
            replace(GLOBAL, strategy="search", asynchronous=True),
        )


def test_the_command_writes_a_strategy_that_compile_takes(tmp_path: Path) -> None:
    train, cluster, strategy = (
        tmp_path / name for name in ("train.onnx", "cluster.json", "new/strategy.json")
    )
    onnx.save(wide_mlp(), train)
    cluster.write_bytes(encode_cluster(cluster_of("2x2")))
    asked = [str(train), "-c", str(cluster), "--batch", "global", "-o", str(strategy)]

    said = done("search", *asked, "--budget", "5s")

    assert "x as fast as data parallelism" in said
    assert "strategies priced" in said
    assert read_strategy(strategy).has_meshes
    done("compile", train, "-c", cluster, "--strategy", strategy, "-o", tmp_path / "out")
    said = done("search", *asked, "--proposals", "1", "--method", "dp")
    assert "the least sum of times is" in said
    refused = partc("search", *asked, "--budget", "soon")
    assert (refused.code, "'soon' is no time" in refused.error) == (2, True)


def test_where_replicas_do_not_fit_it_begins_at_a_name_that_does() -> None:
    whole = fullest_bytes("allreduce")
    parted = fullest_bytes("tensor=4")
    cluster = small_devices("1x4", parted)
    assert parted < whole

    found = search(wide_mlp(), cluster, searching(3.0))

    assert found.data_parallel is None
    with pytest.raises(DoesNotFit):
        compile_step(wide_mlp(), cluster, "unwritten", replace(GLOBAL, strategy="allreduce"))
    with TemporaryDirectory() as folder:
        options = replace(GLOBAL, strategy=found.best.strategy)
        assert compile_step(wide_mlp(), cluster, folder, options).timeline.step_s == found.best.step_s


def fullest_bytes(strategy: str) -> int:
    """Return the bytes of the fullest device."""
    with TemporaryDirectory() as folder:
        plan = compile_step(wide_mlp(), cluster_of("1x4"), folder, replace(GLOBAL, strategy=strategy)).plan
    return max(need.certain_bytes for need in memory_of(plan, cluster_of("1x4")))


@pytest.mark.long
def test_pipelines_between_names_are_found_and_told() -> None:
    step = uneven_mlp()
    told: list[str] = []
    options = replace(GLOBAL, search=SearchOptions(method="mcmc", proposals=100))

    found = search(step, cluster_of("2x2"), options, lambda best, data_parallel: told.append(best.name))

    price = WholeSteps(lambda: import_training_graph(step), cluster_of("2x2"), GLOBAL)
    named = [
        priced.step_s
        for name in names_for(["host0", "host0", "host1", "host1"])
        if (priced := price(name, name))
    ]
    assert found.best.step_s <= min(named)
    assert any(name.startswith("pipeline: ") for name in told)
    assert any("pipelines priced" in remark for remark in found.remarks)
