"""t(P) = theta0 + theta1 / P + theta2 P: fitted, and sampled as the paper samples."""

import itertools

import numpy as np
import pytest

from partc.compiler.planning.choose_partitions import describe_fit, fit_partitions, sample_partitions


@pytest.mark.parametrize("thetas", [(0.1, 0.4, 0.002), (0.0, 1.0, 0.01), (0.2, 0.0, 0.0)])
def test_known_thetas_are_found(thetas: tuple[float, float, float]) -> None:
    measured = {p: thetas[0] + thetas[1] / p + thetas[2] * p for p in (1, 2, 4, 8, 16)}

    fit = fit_partitions(measured, servers=16)

    np.testing.assert_allclose(fit.thetas, thetas, atol=1e-12)
    best = min(range(1, 17), key=lambda p: (round(thetas[0] + thetas[1] / p + thetas[2] * p, 12), -p))
    assert fit.chosen == best
    assert fit.step_s(3) == pytest.approx(thetas[0] + thetas[1] / 3 + 3 * thetas[2])


def test_noisy_times_give_what_numpy_s_least_squares_gives() -> None:
    random = np.random.default_rng(0)
    points = np.array([1, 2, 4, 8, 16, 32], float)
    for _ in range(20):
        thetas = random.uniform([0.1, 0.5, 0.01], [0.3, 1.0, 0.05])
        columns = np.stack([np.ones(6), 1 / points, points], 1)
        times = columns @ thetas * random.normal(1, 0.01, 6)

        fit = fit_partitions(dict(zip(points.astype(int).tolist(), times.tolist(), strict=True)), 32)

        expected = np.linalg.lstsq(columns, times, rcond=None)[0]
        assert (expected > 0).all()  # then no bound is met
        np.testing.assert_allclose(fit.thetas, expected, rtol=1e-9)


def test_no_cost_is_negative_and_none_of_such_would_fit_better() -> None:
    """Where plain least squares says that partitions gain by their number, the bound is 0."""
    points, times = np.array([1.0, 2.0, 4.0, 8.0]), np.array([1.0, 0.52, 0.2, 0.05])
    columns = np.stack([np.ones(4), 1 / points, points], 1)
    assert np.linalg.lstsq(columns, times, rcond=None)[0].min() < 0

    fit = fit_partitions(dict(zip(points.astype(int).tolist(), times.tolist(), strict=True)), 8)

    assert min(fit.thetas) >= 0
    error = np.sum((columns @ fit.thetas - times) ** 2)
    grid = np.linspace(0, 1.5, 61)
    others = np.array(list(itertools.product(grid / 4, grid, grid / 20)))
    assert error <= np.sum((others @ columns.T - times) ** 2, axis=1).min() + 1e-12


def test_samples_are_doubled_from_the_machines_then_halved_while_that_gains() -> None:
    asked: list[int] = []

    def measure_s(partitions: int) -> float:
        asked.append(partitions)
        return 0.1 + 1.0 / partitions + 0.01 * partitions  # least at P = 10

    found = sample_partitions(measure_s, machines=4, least=1, most=64)

    assert asked == [4, 8, 16, 2]  # 16 takes longer than 8; so does 2 than 4
    assert list(found) == [2, 4, 8, 16]
    assert fit_partitions(found, servers=64).chosen == 10


def test_samples_stay_within_what_is_allowed() -> None:
    assert list(sample_partitions(lambda p: 1 / p, 2, least=2, most=8)) == [2, 4, 8]
    assert list(sample_partitions(lambda p: float(p), 8, least=3, most=8)) == [3, 4, 8]
    assert list(sample_partitions(lambda p: 1.0, 1, least=5, most=5)) == [5]


def test_more_partitions_than_servers_are_as_many_on_each() -> None:
    thetas = (0.0, 0.9, 0.1)  # least at P = 3

    chosen = fit_partitions({p: thetas[0] + thetas[1] / p + thetas[2] * p for p in (1, 2, 4, 8)}, 2).chosen

    assert chosen == 4  # 0.625 s, of 2 and 4; 3 would burden one of two servers twice as much


def test_a_fit_is_told_beside_what_is_simulated() -> None:
    text = describe_fit(fit_partitions({1: 0.9, 2: 0.5, 4: 0.3}, 4), {1: 0.8, 2: 0.4, 4: 0.2})

    assert "4 partitions" in text
    assert "P = 2: measured 500.00 ms, by the curve 500.00 ms, simulated 400.00 ms" in text
