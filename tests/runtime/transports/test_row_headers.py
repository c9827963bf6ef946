import numpy as np
import pytest

from partc.runtime.errors import RankFailed
from partc.runtime.transports.row_headers import header_size, read_headers, write_header

IDS = np.zeros(3, np.int64)
ROWS = np.zeros((3, 5, 2), np.float32)


def headers(members: int = 3) -> np.ndarray:
    """Members 0 and 2 send 3 rows each, member 1 nothing."""
    result = np.zeros((members, header_size(2)), np.int64)
    for member in (0, 2):
        write_header(result[member], 3, [IDS, ROWS])
    return result


def test_types_and_counts_are_read_back() -> None:
    counts, types = read_headers(headers(), "here")

    assert counts == (3, 0, 3)
    assert [row.dtype for row in types] == [np.int64, np.float32]
    assert [row.shape for row in types] == [(), (5, 2)]
    assert [row.row_bytes for row in types] == [8, 40]


def test_nobody_sends() -> None:
    assert read_headers(np.zeros((2, header_size(1)), np.int64), "here") == ((0, 0), ())


@pytest.mark.parametrize(
    ("member", "field", "value"),
    [(0, 0, -1), (1, 0, 5), (0, 1, 99), (2, 2, 7), (2, 11, 4), (0, 0, 1 << 50)],
)
def test_a_header_that_lies_is_refused_before_memory_is_taken(member: int, field: int, value: int) -> None:
    lying = headers()
    lying[member, field] = value

    with pytest.raises(RankFailed, match="does not fit the plan"):
        read_headers(lying, "here")
