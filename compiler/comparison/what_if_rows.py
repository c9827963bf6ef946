"""What was priced of changes, in words: for the report's table, and the lines that `compile` prints."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from partc.compiler.report.units import count, percent, plural, seconds, size, with_arrow
from partc.cost.what_if import Dimension, PricedChange, PricedStep, WhatIf

TITLES: dict[Dimension, str] = {
    "strategy": "Strategy",
    "links": "Rate of the links",
    "latency": "Latency of the links",
    "devices": "Devices",
    "hosts": "Hosts",
    "batch": "Batch",
}
UNKNOWN = "\u2013"
MOST_LINES = 4


@dataclass(frozen=True, slots=True)
class ChangeRow:
    """A change and its prices. `share`: of the longest time that a sample takes in the table."""

    value: str
    meaning: str
    compiled: str
    versus: str  # the plan
    same_plan: str
    throughput: str
    busiest: str
    memory: str
    decisions: str
    not_priced: str
    share: float = 0.0
    samples: str = ""  # of a step, where they are not the plan's
    is_plan: bool = False

    @property
    def has_price(self) -> bool:
        """Return whether the step was priced, compiled for it or as the plan is."""
        return not self.not_priced or self.same_plan != UNKNOWN


@dataclass(frozen=True, slots=True)
class ChangeTable:
    """All changes of one thing: those with a price, the plan's own among them, and why others have none.

    plan_alone     reason -> changes that are priced for the plan as it is, and not compiled anew
    without_price  reason -> changes that are not in `rows`
    """

    dimension: str
    title: str
    rows: tuple[ChangeRow, ...]
    plan_alone: Mapping[str, list[str]]
    without_price: Mapping[str, list[str]]
    unnamed: str = UNKNOWN  # the value where nothing of the dimension can be changed


def what_if_tables(what_if: WhatIf) -> tuple[ChangeTable, ...]:
    """Return a table for each dimension: strategies by time for a sample, numbers in their order."""
    return tuple(
        _table(dimension, title, tuple(_rows(what_if, dimension)))
        for dimension, title in TITLES.items()
        if any(change.dimension == dimension for change in what_if.changes)
    )


def _table(dimension: Dimension, title: str, rows: Sequence[ChangeRow]) -> ChangeTable:
    plan_alone: dict[str, list[str]] = {}
    without_price: dict[str, list[str]] = {}
    for row in rows:
        if row.not_priced:
            reasons = plan_alone if row.has_price else without_price
            reasons.setdefault(row.not_priced, []).append(row.value)
    priced = tuple(row for row in rows if row.has_price)
    return ChangeTable(dimension, title, priced, plan_alone, without_price)


def _rows(what_if: WhatIf, dimension: Dimension) -> Iterator[ChangeRow]:
    changes = [change for change in what_if.changes if change.dimension == dimension]
    times = [_time_of_sample(change.compiled) for change in changes if change.compiled is not None]
    longest_s = max((*times, _time_of_sample(what_if.plan)))
    rows = [(_order(change), row_of(change, what_if.plan, longest_s)) for change in changes]
    plan_share = _time_of_sample(what_if.plan) / longest_s if longest_s else 0.0
    rows.append((_order_of_plan(what_if, dimension), _plan_row(what_if, plan_share)))
    yield from (row for _, row in sorted(rows, key=lambda pair: pair[0]))


def _order(change: PricedChange) -> tuple[bool, float]:
    """Return what sorts a change: numbers by value, others by the time for a sample; no price last."""
    digits = change.value.rpartition("=")[2].removeprefix("x")
    if change.dimension == "strategy" or not digits.replace(".", "").isdigit():
        price = change.compiled
        return price is None, _time_of_sample(price) if price is not None else 0.0
    return False, float(digits)


def _order_of_plan(what_if: WhatIf, dimension: Dimension) -> tuple[bool, float]:
    has_profiles = any(c.dimension == "devices" and not c.value.startswith("x") for c in what_if.changes)
    if dimension == "strategy" or (dimension == "devices" and has_profiles):
        return False, _time_of_sample(what_if.plan)
    hosts = what_if.hosts if dimension == "hosts" else what_if.batch if dimension == "batch" else 1
    return False, float(hosts)


def _time_of_sample(price: PricedStep) -> float:
    return price.step_s / price.samples if price.samples else price.step_s


def row_of(change: PricedChange, plan: PricedStep, longest_s: float) -> ChangeRow:
    """Return a change in words. `longest_s`: that a sample takes in the table."""
    price = change.compiled or change.same_plan
    return ChangeRow(
        change.value or UNKNOWN,
        change.meaning,
        _step(change.compiled),
        _versus(change.compiled, plan),
        _step(change.same_plan),
        _throughput(price),
        _busiest(price),
        _memory(price),
        change.decisions,
        change.not_priced,
        _time_of_sample(change.compiled) / longest_s if change.compiled is not None and longest_s else 0.0,
        _other_samples(price, plan),
    )


def _plan_row(what_if: WhatIf, share: float) -> ChangeRow:
    plan = what_if.plan
    return ChangeRow(
        "this plan",
        "as it was compiled",
        seconds(plan.step_s),
        "",
        seconds(plan.step_s),
        _throughput(plan),
        _busiest(plan),
        _memory(plan),
        what_if.decisions,
        "",
        share,
        is_plan=True,
    )


def _step(price: PricedStep | None) -> str:
    return UNKNOWN if price is None else seconds(price.step_s)


def _versus(price: PricedStep | None, plan: PricedStep) -> str:
    """Return how much quicker or slower a sample is trained than by the plan: 1.80 times as quick."""
    if price is None or not price.step_s:
        return ""
    ratio = _time_of_sample(plan) / _time_of_sample(price)
    if abs(ratio - 1) < 0.005:
        return "as quick"
    return f"{ratio:.2f} times as quick" if ratio >= 1 else f"takes {1 / ratio:.2f} times as long"


def _other_samples(price: PricedStep | None, plan: PricedStep) -> str:
    """Return how many samples a step trains, where it is not as many as the plan's."""
    if price is None or price.samples in (None, plan.samples):
        return ""
    return f"for {plural(price.samples, 'sample')}"


def _throughput(price: PricedStep | None) -> str:
    return UNKNOWN if price is None or price.samples_per_s is None else f"{count(price.samples_per_s)}/s"


def _busiest(price: PricedStep | None) -> str:
    if price is None:
        return UNKNOWN
    if not price.busiest_link:
        return "nothing is sent"
    return f"{with_arrow(price.busiest_link)}, {percent(price.busiest_share)}"


def _memory(price: PricedStep | None) -> str:
    if price is None:
        return UNKNOWN
    share = price.memory_bytes / price.memory_limit_bytes
    return f"{size(price.memory_bytes)}, {percent(share)}"


def what_if_lines(what_if: WhatIf | None) -> Iterator[str]:
    """Yield the changes that make a sample quickest, and how many were priced."""
    if what_if is None:
        return
    priced = [change for change in what_if.changes if change.compiled is not None]
    best = sorted(priced, key=lambda change: _time_of_sample(change.compiled or what_if.plan))
    quickest = [
        f"{change.dimension} {change.value} ({seconds(change.compiled.step_s)} a step)"
        for change in best[:MOST_LINES]
        if change.compiled is not None
    ]
    rest = len(what_if.changes) - len(priced)
    yield f"what if: {len(priced)} changes priced, {rest} not; quickest for a sample: {', '.join(quickest)}"
