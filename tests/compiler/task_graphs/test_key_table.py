"""Keys have the numbers in which they came, and are found again, also in a larger table."""

import numpy as np
import pytest

from partc.compiler.task_graphs.key_table import PENDING, Keys, find_key, has_room, no_keys, with_room
from partc.cost.simulation.task_arrays import Ints, compiled

LONGEST = 7


@compiled
def number_of(keys: Keys, key: Ints, longest: int) -> int:
    """Return a key's number, or -1: there is no room."""
    return find_key(keys, key, len(key)) if has_room(keys, longest) else -1


@pytest.mark.parametrize("most", [3, 1 << 30])  # numbers that are alike, and any
def test_a_key_has_the_number_in_which_it_came(most: int) -> None:
    rng, keys = np.random.default_rng(0), no_keys()
    expected: dict[bytes, int] = {}
    for _ in range(6000):
        key = rng.integers(-most, most, rng.integers(1, LONGEST + 1), dtype=np.int32)
        number = number_of(keys, key, LONGEST)
        while number < 0:
            keys = with_room(keys, LONGEST)
            number = number_of(keys, key, LONGEST)
        is_new = key.tobytes() not in expected
        assert number == expected.setdefault(key.tobytes(), len(expected))
        assert keys.value[number] == (PENDING if is_new else number)
        keys.value[number] = number
    assert keys.used[0] == len(expected) > 1000
