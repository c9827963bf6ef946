"""A table from keys, several numbers each, to numbers, in flat arrays for compiled code."""

from typing import NamedTuple

import numpy as np

from partc.cost.simulation.task_arrays import Ints, Longs, compiled, inner

FREE = -1  # a place that no key has
PENDING = -1  # the value of a key that nobody has given one


class Keys(NamedTuple):
    """Keys by number, in the order in which they came, and where they are found.

    place  the number of the key that is at a place, FREE where none is; a power of two of places
    begin  by number: where the key begins, and the last one ends
    part   the numbers that keys consist of
    value  by number
    used   int64[1]: how many keys there are
    """

    place: Ints
    begin: Longs
    part: Ints
    value: Ints
    used: Longs


def no_keys() -> Keys:
    """Return a table without keys."""
    place = np.full(1 << 12, FREE, np.int32)
    return Keys(place, np.zeros(1 << 11, np.int64), _ints(1 << 14), _ints(1 << 11), np.zeros(1, np.int64))


def with_room(keys: Keys, longest: int) -> Keys:
    """Return a table with room for as many keys again, or a few of `longest` numbers."""
    count, parts = int(keys.used[0]), int(keys.begin[keys.used[0]])
    larger = Keys(
        np.full(4 * len(keys.place), FREE, np.int32),
        np.zeros(4 * len(keys.begin), np.int64),
        _ints(4 * len(keys.part) + 4 * longest),
        _ints(4 * len(keys.value)),
        keys.used,
    )
    larger.begin[: count + 1], larger.value[:count] = keys.begin[: count + 1], keys.value[:count]
    larger.part[:parts] = keys.part[:parts]
    place_keys(larger)
    return larger


def _ints(size: int) -> Ints:
    return np.zeros(size, np.int32)


@inner
def find_key(keys: Keys, key: Ints, length: int) -> int:
    """Return the number of the key that is the first `length` numbers of an array; of a new one if need be.

    There is room (see `has_room`).
    """
    mask = len(keys.place) - 1
    place = _mixed(key, length) & mask
    while keys.place[place] != FREE:
        number = keys.place[place]
        if _is_equal(keys, number, key, length):
            return int(number)
        place = (place + 1) & mask
    number = np.int32(keys.used[0])
    begin = keys.begin[number]
    for index in range(length):
        keys.part[begin + index] = key[index]
    keys.place[place], keys.value[number], keys.begin[number + 1] = number, PENDING, begin + length
    keys.used[0] += 1
    return int(number)


@inner
def has_room(keys: Keys, longest: int) -> bool:
    """Tell whether a key of so many numbers fits, and places stay half empty."""
    number = keys.used[0]
    return bool(
        number + 2 < len(keys.begin)
        and keys.begin[number] + longest <= len(keys.part)
        and 2 * (number + 1) < len(keys.place)
    )


@inner
def _is_equal(keys: Keys, number: int, key: Ints, length: int) -> bool:
    begin = keys.begin[number]
    if keys.begin[number + 1] - begin != length:
        return False
    for index in range(length):  # noqa: SIM110  compiled code knows no `all` of a generator
        if keys.part[begin + index] != key[index]:
            return False
    return True


@inner
def _mixed(key: Ints, length: int) -> int:
    mixed = np.uint64(length)
    for index in range(length):
        mixed = (mixed ^ np.uint64(np.uint32(key[index]))) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return int(mixed & np.uint64(0x7FFFFFFF))


@compiled
def place_keys(keys: Keys) -> None:
    """Write the places of all keys, which are all free."""
    mask = len(keys.place) - 1
    for number in range(keys.used[0]):
        begin, end = keys.begin[number], keys.begin[number + 1]
        place = _mixed(keys.part[begin:end], end - begin) & mask
        while keys.place[place] != FREE:
            place = (place + 1) & mask
        keys.place[place] = number
