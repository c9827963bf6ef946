from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from partc.runtime.asynchronous.in_process import SavedVariables, SessionsResult, train_sessions_in_process
from partc.runtime.asynchronous.sessions.session import plan_of_data, with_one_worker
from partc.runtime.data.step_draws import draw_total
from partc.runtime.plan.plan_folder import PlanFolder
from tests.builders.plans.compiled_steps import Batch, import_text
from tests.builders.plans.session_plans import (
    additive_step,
    batches_of_workers,
    compile_sessions,
    start_of,
    train_in_turn,
    train_steps,
    whole_batches,
)

ALIKE = [
    "mlp, momentum, clipped",
    "lm, adagrad, clipped",
    "lm, sgd, time-major, weighed",
    "tied embedding",
    "averages and a counter",
    "foreign, clipped",
]
SEEDS = range(5)


@pytest.fixture(scope="module")
def additive(tmp_path_factory: pytest.TempPathFactory) -> PlanFolder:
    return compile_sessions(additive_step(), tmp_path_factory.mktemp("additive") / "out")


@pytest.fixture(scope="module")
def perceptron(tmp_path_factory: pytest.TempPathFactory) -> PlanFolder:
    return compile_sessions("mlp, sgd", tmp_path_factory.mktemp("mlp") / "out")


@pytest.mark.parametrize(
    ("model", "cluster"), [*((model, "2x1") for model in ALIKE), ("lm, adagrad, clipped", "3x2s")]
)
def test_one_worker_trains_as_one_device(tmp_path: Path, model: str, cluster: str) -> None:
    folder = with_one_worker(compile_sessions(model, tmp_path / "out", cluster))
    batches = batches_of_workers(folder, steps=3)

    result = train_sessions_in_process(folder, batches, seed=1)

    start = start_of(folder)
    for name, expected in train_in_turn(folder, batches).items():
        assert not np.array_equal(expected, start[name])
        np.testing.assert_allclose(result.variables[name], expected, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("staleness", [None, 0, 2])
def test_no_push_is_lost_whatever_the_order(additive: PlanFolder, staleness: int | None) -> None:
    batches = whole_batches(additive, steps=5)
    expected = train_in_turn(additive, batches)

    for seed in SEEDS:
        result = train_sessions_in_process(additive, batches, seed=seed, staleness=staleness)

        assert {server.pushes for server in result.staleness.values()} == {4 * 5}
        for name, value in expected.items():
            np.testing.assert_array_equal(result.variables[name], value, err_msg=f"{name}, seed {seed}")


def test_orders_do_differ_between_seeds(perceptron: PlanFolder) -> None:
    batches = batches_of_workers(perceptron, steps=4)

    one, other, again = (train_sessions_in_process(perceptron, batches, seed=seed) for seed in (1, 2, 1))

    assert not np.array_equal(one.variables["layer0.weight"], other.variables["layer0.weight"])
    np.testing.assert_array_equal(one.variables["layer0.weight"], again.variables["layer0.weight"])


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_nobody_is_further_ahead_than_the_bound_and_some_are_as_far(
    perceptron: PlanFolder, staleness: int
) -> None:
    batches = batches_of_workers(perceptron, steps=10)

    lags = [
        max(server.widest_lag for server in result.staleness.values())
        for seed in SEEDS
        if (result := train_sessions_in_process(perceptron, batches, seed=seed, staleness=staleness))
    ]

    assert max(lags) == staleness


def test_without_a_bound_workers_run_ahead_and_miss_pushes(perceptron: PlanFolder) -> None:
    batches = batches_of_workers(perceptron, steps=20)

    servers = [
        server
        for seed in SEEDS
        for server in train_sessions_in_process(perceptron, batches, seed=seed).staleness.values()
    ]

    assert max(server.widest_lag for server in servers) > 3
    assert any(missed > 3 for server in servers for missed in server.missed)


@pytest.mark.parametrize("model", ["averages and a counter", "foreign adam"])
def test_a_counter_counts_every_push(tmp_path: Path, model: str) -> None:
    folder = compile_sessions(model, tmp_path / "out")

    result = train_sessions_in_process(folder, batches_of_workers(folder, steps=3), seed=5)

    assert result.variables["count"] == start_of(folder)["count"] + 4 * 3


def test_what_workers_keep_is_saved_as_their_mean(tmp_path: Path) -> None:
    folder = compile_sessions("averages and a counter", tmp_path / "out")
    batches = batches_of_workers(folder, steps=1)

    result = train_sessions_in_process(folder, batches, seed=5)

    mean = 0.9 * start_of(folder)["x_mean"] + 0.1 * batches[0]["x"].mean(axis=0)
    np.testing.assert_allclose(result.variables["x_mean"], mean, rtol=1e-12)


@pytest.mark.parametrize("staleness", [None, 0])
@pytest.mark.parametrize("turn", [1, 40, 90])
def test_the_death_of_a_worker_stops_no_other(
    perceptron: PlanFolder, turn: int, staleness: int | None
) -> None:
    batches = batches_of_workers(perceptron, steps=5)

    result = train_sessions_in_process(perceptron, batches, seed=3, staleness=staleness, dies={2: turn})

    steps = {worker: len(losses) for worker, losses in result.losses.items()}
    assert [steps[worker] for worker in (0, 1, 3)] == [5, 5, 5]
    assert steps[2] < 5
    assert all(3 * 5 <= server.pushes < 4 * 5 for server in result.staleness.values())


def assert_pushes_are_whole(
    folder: PlanFolder, result: SessionsResult, batches: Sequence[Batch], seed: int
) -> None:
    """Whatever servers hold, then and at each checkpoint, is all of some pushes, the same on all servers."""
    assert {server.pushes for server in result.staleness.values()} == {sum(result.steps)}
    for saved in (*result.saved, SavedVariables(result.steps, result.variables)):
        for name, value in train_steps(folder, batches, saved.steps).items():
            what = f"{name} after {saved.steps} of seed {seed}"
            np.testing.assert_array_equal(saved.variables[name], value, err_msg=what)


@pytest.mark.parametrize("staleness", [None, 1])
def test_a_push_is_applied_wholly_or_nowhere_whenever_workers_die(
    additive: PlanFolder, staleness: int | None
) -> None:
    batches = whole_batches(additive, steps=4)
    ends: set[int] = set()

    for seed in range(12):
        dies = dict(zip((1, 2), np.random.default_rng(seed).integers(1, 900, 2).tolist(), strict=True))
        result = train_sessions_in_process(additive, batches, seed=seed, staleness=staleness, dies=dies)

        assert (result.steps[0], result.steps[3]) == (4, 4)
        ends.add(result.steps[1])
        assert_pushes_are_whole(additive, result, batches, seed)
    assert len(ends) > 2


@pytest.mark.parametrize("staleness", [None, 1])
def test_workers_that_come_back_train_what_they_had_not(additive: PlanFolder, staleness: int | None) -> None:
    batches = whole_batches(additive, steps=4)

    for seed in range(8):
        turns = np.random.default_rng(seed).integers(1, 600, 6).tolist()
        result = train_sessions_in_process(
            additive,
            batches,
            seed=seed,
            staleness=staleness,
            dies={1: turns[0], 2: turns[1], 5: turns[0] + turns[2]},  # 5 is what worker 1 comes back as
            comes_back={1: turns[3] // 4, 2: turns[4] // 4, 5: turns[5] // 4},
            save_every=1,
        )

        assert result.steps == (4, 4, 4, 4)
        assert_pushes_are_whole(additive, result, batches, seed)
        if staleness is not None:
            assert all(server.widest_lag <= staleness for server in result.staleness.values())


def test_checkpoints_hold_whole_pushes_of_workers_in_any_step(additive: PlanFolder) -> None:
    batches = whole_batches(additive, steps=6)

    unequal = 0
    for seed in SEEDS:
        result = train_sessions_in_process(additive, batches, seed=seed, save_every=1)

        assert [sum(saved.steps) // 4 for saved in result.saved] == sorted(
            {sum(saved.steps) // 4 for saved in result.saved}
        )
        assert len(result.saved) >= 5
        unequal += sum(len(set(saved.steps)) > 1 for saved in result.saved)
        assert_pushes_are_whole(additive, result, batches, seed)
    assert unequal > len(SEEDS)


def test_what_a_checkpoint_holds_is_gone_on_from(additive: PlanFolder) -> None:
    batches = whole_batches(additive, steps=5)
    (saved, *_) = train_sessions_in_process(additive, batches[:3], seed=2, save_every=1).saved

    result = train_sessions_in_process(additive, batches, initial=saved.variables, steps=saved.steps)

    assert result.steps == (5, 5, 5, 5)
    for name, value in train_in_turn(additive, batches).items():
        np.testing.assert_array_equal(result.variables[name], value, err_msg=name)


def test_a_worker_that_comes_back_has_what_it_kept(tmp_path: Path) -> None:
    folder = compile_sessions("averages and a counter", tmp_path / "out", "1x2")
    batches = batches_of_workers(folder, steps=4)

    for seed in range(6):
        turn = int(np.random.default_rng(seed).integers(1, 120))
        result = train_sessions_in_process(folder, batches, seed=seed, dies={1: turn}, comes_back={1: 5})

        assert result.steps == (4, 4)
        assert result.variables["count"] == start_of(folder)["count"] + 2 * 4
        mean = start_of(folder)["x_mean"]
        for batch in batches:
            mean = 0.9 * mean + 0.1 * batch["x"].mean(axis=0)
        np.testing.assert_allclose(result.variables["x_mean"], mean, rtol=1e-12, err_msg=f"seed {seed}")


@pytest.mark.long
def test_pushes_stay_whole_in_many_orders(additive: PlanFolder) -> None:
    batches = whole_batches(additive, steps=4)

    for seed in range(150):
        turns = np.random.default_rng(seed).integers(1, 1200, 4).tolist()
        result = train_sessions_in_process(
            additive,
            batches,
            seed=seed,
            staleness=seed % 3 or None,
            dies=dict(enumerate(turns)) | {4: turns[0] + turns[1]},
            comes_back=dict(enumerate(turns)) if seed % 2 else {0: 7},
            save_every=1,
        )

        assert_pushes_are_whole(additive, result, batches, seed)


@pytest.mark.parametrize("staleness", [None, 1])
def test_a_perceptron_learns(perceptron: PlanFolder, staleness: int | None) -> None:
    same = batches_of_workers(perceptron, steps=1) * 25

    result = train_sessions_in_process(perceptron, same, seed=1, staleness=staleness)

    for losses in result.losses.values():
        assert losses[0] is not None and losses[-1] is not None
        assert losses[-1] < 0.85 * losses[0]


@pytest.mark.long
@pytest.mark.parametrize("staleness", [None, 0])
def test_a_language_model_learns(tmp_path: Path, staleness: int | None) -> None:
    folder = compile_sessions("lm, adagrad, clipped", tmp_path / "out")
    same = batches_of_workers(folder, steps=1) * 60

    result = train_sessions_in_process(folder, same, seed=1, staleness=staleness)

    for losses in result.losses.values():
        assert losses[0] is not None and losses[-1] is not None
        assert losses[-1] < 0.9 * losses[0]


@pytest.mark.long
def test_no_push_is_lost_in_many_orders(additive: PlanFolder) -> None:
    batches = whole_batches(additive, steps=8)
    expected = train_in_turn(additive, batches)

    for seed in range(100):
        result = train_sessions_in_process(additive, batches, seed=seed, staleness=seed % 4 or None)

        for name, value in expected.items():
            np.testing.assert_array_equal(result.variables[name], value, err_msg=f"{name}, seed {seed}")


def test_every_worker_draws_for_its_own_samples(tmp_path: Path) -> None:
    """The gradient is what was drawn: the servers end with the sum of all workers' draws."""
    text = """step (double[4,3] x, double[3] W) => (double loss, double[3] W_next) <int64[1] rows = {0}> {
        z = RandomNormalLike (x) y = Mul (x, W) loss = ReduceSum <keepdims = 0> (y) p = Mul (x, z)
        dW = ReduceSum <keepdims = 0> (p, rows) W_next = Sub (W, dW) }"""
    folder = compile_sessions(import_text(text, loss="loss"), tmp_path / "out")
    batches = [{"x": np.ones((16, 3))}] * 3

    result = train_sessions_in_process(folder, batches, seed=1)

    plan = plan_of_data(folder.plan)
    drawn = [sum(draw_total(plan, batches[0], step, 0).values()).sum(axis=0) for step in range(3)]
    np.testing.assert_allclose(result.variables["W"], start_of(folder)["W"] - sum(drawn), rtol=1e-12)
