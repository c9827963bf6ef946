"""A comparison as tables for a terminal, and as a page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from partc.compiler.comparison.difference_rows import difference_rows, signed, sum_row, total_row
from partc.compiler.report.page import render_part
from partc.compiler.report.units import count, first_words, seconds, shorten, size, with_arrow
from partc.cost.comparison import Amount, ComparedSide, Comparison, Moved

MOST_ROWS = 16
MOST_NAMES = 4
NAME_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class SideFigures:
    """What stands of a side at the top of the page."""

    letter: str
    name: str
    kind: str  # predicted, measured
    step: str
    throughput: str


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """A table: its title, column heads, of which the numbers stand right, and rows of texts."""

    title: str
    columns: tuple[str, ...]
    numbers: tuple[int, ...]
    rows: tuple[tuple[str, ...], ...]


def tables_of(comparison: Comparison) -> Iterator[ComparedTable]:
    """Yield the tables that have rows."""
    yield _steps(comparison)
    yield _differences(comparison)
    for title, changes in (("Variables", comparison.variables), ("Operators", comparison.operators)):
        if changes:
            rows = _some([(_named(entry), entry.before, entry.after) for entry in changes])
            yield ComparedTable(f"{title} that moved", (title, "A", "B"), (), rows)
    changed = [a for a in comparison.communications if _differs(a)]
    if changed:
        rows = _some([(a.what, *_counted(a)) for a in changed])
        yield ComparedTable("Communications of a rank", ("Kind", "A", "B"), (1, 2), rows)
    links = [amount for amount in comparison.links if _differs(amount)]
    if links:
        rows = _some([(a.what, size(a.before_bytes), size(a.after_bytes)) for a in links])
        yield ComparedTable("Bytes of a step on links", ("Link", "A", "B"), (1, 2), rows)


def _steps(comparison: Comparison) -> ComparedTable:
    sides = comparison.before, comparison.after
    rows = [
        ("a step", *(f"{seconds(side.account.step_s)} {side.kind}" for side in sides)),
        ("samples", *(_throughput(side) for side in sides)),
        ("fullest device", *(size(side.memory_bytes) for side in sides)),
    ]
    return ComparedTable(
        "Steps",
        ("", *(f"{x}: {side.name}" for x, side in zip("AB", sides, strict=True))),
        (1, 2),
        tuple(rows),
    )


def _throughput(side: ComparedSide) -> str:
    if side.samples is None or not side.account.step_s:
        return "unknown"
    return f"{count(side.samples / side.account.step_s)}/s, {count(side.samples)} a step"


def _differences(comparison: Comparison) -> ComparedTable:
    largest, others = comparison.differences[:MOST_ROWS], comparison.differences[MOST_ROWS:]
    rows = list(difference_rows(largest, ("A", "B")))
    if others:
        rows.append(sum_row(f"{len(others)} more", others))
    rows.append(total_row(comparison.before.account.step_s, comparison.after.account.step_s))
    texts = [(row.what, row.before, row.after, row.difference, row.remark) for row in rows]
    columns = ("On the critical path", "A", "B", "Difference", "Where")
    return ComparedTable("Why", columns, (1, 2, 3), tuple(texts))


def _named(entry: Moved) -> str:
    return first_words([shorten(name, NAME_CHARACTERS) for name in entry.names], MOST_NAMES)


def _differs(amount: Amount) -> bool:
    return (amount.before_bytes, amount.before_count) != (amount.after_bytes, amount.after_count)


def _counted(amount: Amount) -> tuple[str, str]:
    return (
        _messages(amount.before_count, amount.before_bytes),
        _messages(amount.after_count, amount.after_bytes),
    )


def _messages(number: int, together_bytes: float) -> str:
    return f"{number}, {size(together_bytes)} together" if number else "none"


def _some(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    more = len(rows) - MOST_ROWS
    return (*rows[:MOST_ROWS], (f"{more} more", "", "")) if more > 0 else tuple(rows)


def headline_of(comparison: Comparison) -> str:
    """Return the comparison in one line."""
    before_s, after_s = comparison.before.account.step_s, comparison.after.account.step_s
    return f"{seconds(before_s)} -> {seconds(after_s)}: {comparison.reason}"


def comparison_tables(comparison: Comparison) -> Iterator[Table]:
    """Yield what a terminal shows."""
    for table in tables_of(comparison):
        rich_table = Table(title=table.title)
        for number, column in enumerate(table.columns):
            rich_table.add_column(
                column, justify="right" if number in table.numbers else "left", overflow="fold"
            )
        for row in table.rows:
            rich_table.add_row(*row)
        yield rich_table


def comparison_page(comparison: Comparison) -> str:
    """Return the page."""
    tables = [
        replace(table, rows=tuple(tuple(map(with_arrow, row)) for row in table.rows))
        for table in tables_of(comparison)
    ]
    sides = comparison.before, comparison.after
    figures = [
        SideFigures(letter, side.name, side.kind, seconds(side.account.step_s), _throughput(side))
        for letter, side in zip("AB", sides, strict=True)
    ]
    before_s, after_s = (side.account.step_s for side in sides)
    context = {
        "sides": figures,
        "difference": signed(after_s - before_s),
        "reason": _sentence(comparison.reason),
        "tables": tables,
    }
    return render_part("comparison.html", context)


def _sentence(reason: str) -> str:
    return f"{with_arrow(reason[:1].upper() + reason[1:])}."
