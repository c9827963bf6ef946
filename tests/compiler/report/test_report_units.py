import pytest

from partc.compiler.report import units


def plain(text: str) -> str:
    return text.replace(units.NO_BREAK, " ")


@pytest.mark.parametrize(
    ("value_s", "text"),
    [(0.0, "0 s"), (3.2e-6, "3.20 µs"), (0.0064, "6.40 ms"), (0.99996, "1.00 s"), (4942.2, "4,942 s")],
)
def test_time_has_three_digits_and_a_fitting_unit(value_s: float, text: str) -> None:
    assert plain(units.seconds(value_s)) == text


@pytest.mark.parametrize(
    ("value_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (999_960, "1.00 MB"), (1_638_400_000, "1.64 GB"), (37.8e6, "37.8 MB")],
)
def test_size_moves_to_the_next_prefix_where_rounding_does(value_bytes: float, text: str) -> None:
    assert plain(units.size(value_bytes)) == text


def test_rate_is_in_bits() -> None:
    assert plain(units.rate(125e6)) == "1.00 Gbit/s"


def test_ranges_shorten_runs() -> None:
    assert units.ranges([0, 1, 2, 5]) == "0–2, 5"
    assert units.some_ranges(range(0, 48, 6), 2) == "0, 6, …"


def test_of_many_words_the_first_are_listed() -> None:
    assert units.first_words(["a", "b"], 2) == "a, b"
    assert units.first_words(["a", "b", "c", "d"], 2) == "a, b and 2 more"


def test_small_shares_keep_two_digits() -> None:
    assert [plain(units.percent(share)) for share in (0.0, 0.0032, 0.02, 0.5)] == [
        "0 %",
        "0.32 %",
        "2.0 %",
        "50 %",
    ]


def test_long_names_lose_their_beginning() -> None:
    assert units.shorten("transformer.h.0.weight", 10) == "….0.weight"
    assert units.shorten("W", 10) == "W"


def test_words_are_joined_as_in_a_sentence() -> None:
    assert units.join_words(["a", "b", "c"]) == "a, b and c"
