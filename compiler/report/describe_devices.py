"""Memory and traffic of every rank. Ranks that are alike share a line."""

from dataclasses import dataclass

from partc.compiler.report.units import percent, plural, size, some_ranges
from partc.cost.simulation.memory import DeviceMemory
from partc.cost.simulation.timeline import Timeline
from partc.runtime.plan.program import Plan


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A piece of a stacked bar: a share of the bar's whole length."""

    kind: str
    share: float
    title: str


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A line of the table."""

    ranks: str
    where: str
    plays: str
    parts: tuple[MemoryPart, ...]
    variables: str
    buffers: str
    values: str  # kept between segments
    activations: str
    needed: str
    limit: str
    used: str
    fits: bool
    sent: str
    received: str
    sent_share: float  # of the most that any rank sends or receives
    received_share: float


def describe_devices(
    memory: tuple[DeviceMemory, ...], timeline: Timeline, plan: Plan
) -> tuple[DeviceRow, ...]:
    """Return a line per kind of rank."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for needs, rank in zip(memory, plan.ranks, strict=True):
        traffic = timeline.sent_bytes[rank.rank], timeline.received_bytes[rank.rank]
        memory_parts = needs.variables_bytes, needs.buffers_bytes, needs.values_bytes, needs.activations_bytes
        # What a reader cannot tell apart is not told apart.
        key = rank.sites, *(size(value) for value in (*memory_parts, needs.limit_bytes, *traffic))
        groups.setdefault(key, []).append(rank.rank)
    busiest = max([1, *timeline.sent_bytes.values(), *timeline.received_bytes.values()])
    return tuple(_describe(ranks, memory[ranks[0]], timeline, plan, busiest) for ranks in groups.values())


def _describe(
    ranks: list[int], needs: DeviceMemory, timeline: Timeline, plan: Plan, busiest_bytes: int
) -> DeviceRow:
    first = plan.ranks[ranks[0]]
    sent, received = timeline.sent_bytes[first.rank], timeline.received_bytes[first.rank]
    return DeviceRow(
        ranks=some_ranges(ranks, 2),
        where=first.device if len(ranks) == 1 else plural(len(ranks), "rank"),
        plays=" + ".join(first.sites),
        parts=_memory_parts(needs),
        variables=size(needs.variables_bytes),
        buffers=size(needs.buffers_bytes),
        values=size(needs.values_bytes),
        activations=size(needs.activations_bytes),
        needed=size(needs.needed_bytes),
        limit=size(needs.limit_bytes),
        used=percent(needs.needed_bytes / max(1, needs.limit_bytes)),
        fits=needs.needed_bytes <= needs.limit_bytes,
        sent=size(sent),
        received=size(received),
        sent_share=sent / busiest_bytes,
        received_share=received / busiest_bytes,
    )


def _memory_parts(needs: DeviceMemory) -> tuple[MemoryPart, ...]:
    whole = max(needs.limit_bytes, needs.needed_bytes, 1)
    sizes = (
        ("variables", needs.variables_bytes),
        ("buffers", needs.buffers_bytes),
        ("values", needs.values_bytes),
        ("activations", needs.activations_bytes),
    )
    return tuple(MemoryPart(kind, part / whole, f"{kind}: {size(part)}") for kind, part in sizes)
