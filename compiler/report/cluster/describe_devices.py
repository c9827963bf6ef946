"""Memory and traffic of every rank. Ranks that are alike share a line."""

from dataclasses import dataclass

from partc.compiler.report.describe_program import is_idle, roles_of
from partc.compiler.report.units import percent, plural, size, some_ranges
from partc.cost.simulation.memory import DeviceMemory
from partc.cost.simulation.timeline import Timeline
from partc.runtime.plan.program import Plan


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A piece of a stacked bar: a share of what the fullest rank needs."""

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
    weights: str
    slots: str
    buffers: str
    values: str  # kept between segments
    activations: str
    process: str
    needed: str
    limit: str
    used: str
    used_share: float
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
        # What a reader cannot tell apart is not told apart.
        amounts = *(nbytes for _, nbytes in _kinds(needs)), needs.limit_bytes, *traffic
        key = roles_of(plan, rank), *(size(amount) for amount in amounts)
        groups.setdefault(key, []).append(rank.rank)
    busiest = max([1, *timeline.sent_bytes.values(), *timeline.received_bytes.values()])
    fullest = max([1, *(needs.needed_bytes for needs in memory)])
    return tuple(
        _describe(ranks, memory[ranks[0]], timeline, plan, busiest, fullest) for ranks in groups.values()
    )


def _describe(
    ranks: list[int],
    needs: DeviceMemory,
    timeline: Timeline,
    plan: Plan,
    busiest_bytes: int,
    fullest_bytes: int,
) -> DeviceRow:
    first = plan.ranks[ranks[0]]
    sent, received = timeline.sent_bytes[first.rank], timeline.received_bytes[first.rank]
    return DeviceRow(
        ranks=some_ranges(ranks, 2),
        where=first.device if len(ranks) == 1 else plural(len(ranks), "rank"),
        plays="nothing" if is_idle(plan, first) else " + ".join(roles_of(plan, first)),
        parts=tuple(
            MemoryPart(kind, nbytes / fullest_bytes, f"{kind}: {size(nbytes)}")
            for kind, nbytes in _kinds(needs)
        ),
        weights=size(needs.variables_bytes - needs.slots_bytes),
        slots=size(needs.slots_bytes),
        buffers=size(needs.buffers_bytes),
        values=size(needs.values_bytes),
        activations=size(needs.activations_bytes),
        process=size(needs.process_bytes),
        needed=size(needs.needed_bytes),
        limit=size(needs.limit_bytes),
        used=percent(needs.needed_bytes / max(1, needs.limit_bytes)),
        used_share=min(1.0, needs.needed_bytes / max(1, needs.limit_bytes)),
        fits=needs.needed_bytes <= needs.limit_bytes,
        sent=size(sent),
        received=size(received),
        sent_share=sent / busiest_bytes,
        received_share=received / busiest_bytes,
    )


def _kinds(needs: DeviceMemory) -> tuple[tuple[str, int], ...]:
    return (
        ("weights", needs.variables_bytes - needs.slots_bytes),
        ("slots", needs.slots_bytes),
        ("buffers", needs.buffers_bytes),
        ("values", needs.values_bytes),
        ("activations", needs.activations_bytes),
        ("process", needs.process_bytes),
    )
