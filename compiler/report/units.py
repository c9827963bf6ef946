"""Numbers as a person reads them: SI prefixes, three digits, a space that does not break."""

from collections.abc import Iterable, Sequence

NO_BREAK = "\u00a0"
EN_DASH = "\u2013"

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def seconds(value_s: float) -> str:
    """Print a time: 6.40 ms."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if value_s >= factor * 0.9995:
            return f"{_three_digits(value_s / factor)}{NO_BREAK}{unit}"
    return f"{_three_digits(value_s / 1e-6)}{NO_BREAK}µs" if value_s else f"0{NO_BREAK}s"


def size(value_bytes: float) -> str:
    """Print an amount of data: 1.64 GB."""
    return _with_prefix(value_bytes, "B")


def rate(bytes_per_s: float) -> str:
    """Print a link's bandwidth in bits, as networks are sold: 90.0 Gbit/s."""
    return _with_prefix(bytes_per_s * 8, "bit/s")


def operations(flops: float) -> str:
    """Print an amount of arithmetic: 42.0 GFLOP."""
    return _with_prefix(flops, "FLOP")


def count(value: float) -> str:
    """Print a whole number with separators: 800,000."""
    return f"{value:,.0f}"


def percent(share: float) -> str:
    """Print a share, with more digits where it is small: 0.32 %."""
    if share == 0.0:
        return f"0{NO_BREAK}%"
    if share < 0.00005:
        return f"under{NO_BREAK}0.01{NO_BREAK}%"
    digits = 0 if share >= 0.1 else 1 if share >= 0.01 else 2
    return f"{share * 100:.{digits}f}{NO_BREAK}%"


def plural(number: int, noun: str, several: str = "") -> str:
    """Print a counted noun: 1 host, 8 hosts. `several`: its plural where that is no `s`."""
    return f"{count(number)}{NO_BREAK}{noun if number == 1 else several or noun + 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """Print numbers in ascending order, runs shortened: 0–2, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}{EN_DASH}{b}" for a, b in runs)


def some_ranges(numbers: Sequence[int], most: int = 4) -> str:
    """Print numbers as `ranges` does, but no more than `most` runs of them."""
    runs = ranges(numbers).split(", ")
    return ", ".join(runs[:most]) + (", …" if len(runs) > most else "")


def shorten(name: str, most: int) -> str:
    """Cut a name's beginning off, so that at most `most` characters are left: …fc.weight."""
    return name if len(name) <= most else f"…{name[len(name) - max(most, 2) + 1 :]}"


def with_arrow(way: str) -> str:
    """Print a way as pages do, with a break behind its arrow alone: host0 → host1."""
    return way.replace(" -> ", f"{NO_BREAK}→ ")


def join_words(words: Sequence[str]) -> str:
    """Join words as in a sentence: a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def first_words(words: Sequence[str], most: int) -> str:
    """List words, of more than `most` the first ones: a, b and 2 more."""
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")


def _with_prefix(value: float, unit: str) -> str:
    for factor, prefix in _PREFIXES:
        if value >= factor * 0.9995:
            return f"{_three_digits(value / factor)}{NO_BREAK}{prefix}{unit}"
    return f"{value:.0f}{NO_BREAK}{unit}"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def solver_work(deterministic_time: float) -> str:
    """Print CP-SAT's deterministic time: work of about as many seconds, the same on every machine.

    Nothing is printed where presolving answered, and nothing was searched.
    """
    return f"about {seconds(deterministic_time)}" if deterministic_time >= 5e-5 else ""
