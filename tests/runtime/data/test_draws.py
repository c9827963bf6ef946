import numpy as np
import pytest

from partc.runtime.data.draws import integer_rows, normal_rows, uniform_rows

SHAPE = (5000, 37)  # several blocks


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (0, 5000), (1770, 1773), (1234, 4999), (4999, 5000), (7, 7)]
)
def test_any_rows_equal_the_same_rows_of_the_whole(dtype: type, start: int, stop: int) -> None:
    kind = np.dtype(dtype)

    whole = normal_rows(3, SHAPE, 0, 5000, kind, mean=1.0, scale=2.0)
    part = normal_rows(3, SHAPE, start, stop, kind, mean=1.0, scale=2.0)

    assert part.dtype == kind
    assert part.tobytes() == whole[start:stop].tobytes()
    whole = uniform_rows(3, SHAPE, 0, 5000, kind, low=-1.0, high=1.0)
    part = uniform_rows(3, SHAPE, start, stop, kind, low=-1.0, high=1.0)
    assert part.tobytes() == whole[start:stop].tobytes()


def test_draws_follow_their_distributions() -> None:
    normal = normal_rows(0, SHAPE, 0, 5000, np.dtype(np.float32), mean=1.0, scale=2.0)
    uniform = uniform_rows(0, SHAPE, 0, 5000, np.dtype(np.float32), low=-1.0, high=3.0)
    integers = integer_rows(0, SHAPE, 0, 5000, np.dtype(np.int64), high=10)

    assert abs(normal.mean() - 1) < 0.02
    assert abs(normal.std() - 2) < 0.02
    assert uniform.min() >= -1
    assert uniform.max() <= 3
    assert abs(uniform.mean() - 1) < 0.02
    assert sorted(set(integers.reshape(-1).tolist())) == list(range(10))


def test_seeds_and_blocks_draw_different_values() -> None:
    one = normal_rows(1, SHAPE, 0, 5000, np.dtype(np.float32), mean=0.0, scale=1.0)
    two = normal_rows(2, SHAPE, 0, 5000, np.dtype(np.float32), mean=0.0, scale=1.0)

    assert not (one == two).any()
    assert len(np.unique(one[:, 0])) == 5000


def test_tensors_without_axes_or_elements_are_drawn() -> None:
    assert normal_rows(1, (3, 0), 0, 3, np.dtype(np.float32), mean=0.0, scale=1.0).shape == (3, 0)
    assert normal_rows(-1, (1,), 0, 1, np.dtype(np.float32), mean=0.0, scale=1.0).shape == (1,)
