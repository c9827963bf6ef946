"""The cluster as a picture: hosts around their switches, what each holds, how wide the links are.

    ┌ host ┐ ┌ host ┐      first half of the hosts
    └──┬───┘ └──┬───┘
    ═══╧════════╧═══       a bar per switch
    ┌──┴───┐ ┌──┴───┐      second half
    └──────┘ └──────┘

Coordinates are in the units of the viewBox. Beyond MOST_HOSTS the rest is counted, not drawn.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from math import ceil

from partc.compiler.reporting.units import plural, rate, seconds, size
from partc.cost.cluster import Cluster, Host
from partc.cost.memory import held_bytes
from partc.runtime.program import Plan, Rank

WIDTH = 1080
GAP = 20
CABLE_GAP = 104  # between hosts that a link joins directly, so that its label fits
MOST_HOSTS = 16
COLUMNS = 4
WIDEST_HOST = 520
SHARD_LINES = 3
LINE = 19
CHIP_WIDTH, CHIP_HEIGHT, CHIP_GAP = 72, 40, 6
PADDING = 12
SWITCH_HEIGHT = 30
CABLE = 56  # length of the line between a host and a switch


@dataclass(frozen=True, slots=True)
class Chip:
    """A device, drawn."""

    x: float
    y: float
    name: str
    rank: str
    title: str


@dataclass(frozen=True, slots=True)
class Box:
    """A host, drawn: its server with the shards it owns, and its devices."""

    x: float
    y: float
    width: float
    height: float
    name: str
    memory: str
    server: str
    shards: tuple[str, ...]
    title: str
    chips: tuple[Chip, ...]
    inner_link: str


@dataclass(frozen=True, slots=True)
class Cable:
    """A link between hosts or a host and a switch, drawn."""

    x1: float
    y1: float
    x2: float
    y2: float
    label: str
    title: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A switch, drawn across the picture."""

    y: float
    name: str


@dataclass(frozen=True, slots=True)
class LinkKind:
    """Links of equal rate and latency between like ends."""

    number: int
    ends: str
    rate: str
    latency: str


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that the template draws."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    cables: tuple[Cable, ...]
    bars: tuple[Bar, ...]
    left_out: int
    links: tuple[LinkKind, ...]
    caption: str


def draw_cluster(plan: Plan, cluster: Cluster) -> Picture:
    """Return the picture of a cluster under a plan."""
    drawn = cluster.hosts[:MOST_HOSTS]
    columns = min(COLUMNS, len(drawn)) if len(drawn) <= 2 * COLUMNS else ceil(len(drawn) / 2)
    gap = CABLE_GAP if _joins_hosts(cluster) else GAP
    width = min(WIDEST_HOST, (WIDTH - gap * (columns - 1)) / columns)
    height = max(_box_height(host, plan, width) for host in drawn)
    rows = ceil(len(drawn) / columns)
    band = CABLE * 2 + (SWITCH_HEIGHT + GAP) * len(cluster.switches) - GAP if cluster.switches else GAP * 3
    between = band if rows > 1 or cluster.switches else 0
    left = (WIDTH - columns * width - (columns - 1) * gap) / 2
    boxes = tuple(
        _box(host, plan, left + i % columns * (width + gap), i // columns * (height + between), width, height)
        for i, host in enumerate(drawn)
    )
    bars = tuple(
        Bar(height + CABLE + i * (SWITCH_HEIGHT + GAP), name) for i, name in enumerate(cluster.switches)
    )
    bottom = height * rows + between * (rows - 1)
    if rows == 1 and bars:
        bottom = bars[-1].y + SWITCH_HEIGHT
    return Picture(
        width=WIDTH,
        height=bottom + 2,
        boxes=boxes,
        cables=_cables(cluster, boxes, bars),
        bars=bars,
        left_out=len(cluster.hosts) - len(drawn),
        links=_link_kinds(cluster),
        caption=_caption(plan),
    )


def _joins_hosts(cluster: Cluster) -> bool:
    hosts = {host.name for host in cluster.hosts}
    return any(hosts.issuperset(link.ends) for link in cluster.links)


def _box_height(host: Host, plan: Plan, width: float) -> float:
    shards = len(_shard_lines(host.name, plan)[1])
    chip_rows = ceil(len(host.devices) / _chips_in_a_row(width))
    return PADDING * 3 + LINE * (2 + shards) + 16 + chip_rows * (CHIP_HEIGHT + CHIP_GAP) + LINE


def _chips_in_a_row(width: float) -> int:
    return max(1, int((width - 2 * PADDING + CHIP_GAP) // (CHIP_WIDTH + CHIP_GAP)))


def _box(host: Host, plan: Plan, x: float, y: float, width: float, height: float) -> Box:
    server, shards, title = _shard_lines(host.name, plan)
    shown = len(shards)
    top = PADDING * 3 + LINE * (2 + shown) + 4
    in_row = _chips_in_a_row(width)
    ranks = {rank.device: rank for rank in plan.ranks if rank.host == host.name}
    chips = tuple(
        Chip(
            x + PADDING + i % in_row * (CHIP_WIDTH + CHIP_GAP),
            y + top + i // in_row * (CHIP_HEIGHT + CHIP_GAP),
            device.name.removeprefix(f"{host.name}/"),
            f"rank {ranks[device.name].rank}",
            f"{device.name}: {device.profile}, {plural(device.threads, 'thread')}"
            if device.kind == "cpu"
            else f"{device.name}: {device.profile}",
        )
        for i, device in enumerate(host.devices)
    )
    return Box(
        x, y, width, height, host.name, size(host.memory_bytes), server, shards, title, chips, _profiles(host)
    )


def _profiles(host: Host) -> str:
    profiles = Counter(device.profile for device in host.devices)
    return ", ".join(f"{number} × {name}" for name, number in sorted(profiles.items()))


def _shard_lines(host: str, plan: Plan) -> tuple[str, tuple[str, ...], str]:
    """Return what the host's server owns: a headline, a few lines, and all of it as a title."""
    rank = next((rank for rank in plan.ranks if rank.host == host and "server" in rank.sites), None)
    owned = [] if rank is None else _owned(rank, plan)
    if rank is None or not owned:
        return "server: owns nothing", (), ""
    lines = [f"{parameter}: {size(held)}" for parameter, held in owned]
    shown = lines if len(lines) <= SHARD_LINES else [*lines[: SHARD_LINES - 1]]
    if len(shown) < len(lines):
        rest = owned[len(shown) :]
        shown = [*shown, f"{len(rest)} more: {size(sum(held for _, held in rest))}"]
    total = size(sum(held for _, held in owned))
    return f"server (rank {rank.rank}): {total}", tuple(shown), "; ".join(lines)


def _owned(rank: Rank, plan: Plan) -> list[tuple[str, int]]:
    """Return the bytes that a server owns of each parameter, slots included, the largest first."""
    variables = {variable.name: variable for variable in plan.variables}
    sizes: Counter[str] = Counter()
    for held in rank.held:
        if held.start is not None:
            variable = variables[held.variable]
            sizes[variable.parameter or variable.name] += held_bytes(held, variable)
    return [
        (name, held) for name, held in sorted(sizes.items(), key=lambda item: (-item[1], item[0])) if held
    ]


def _cables(cluster: Cluster, boxes: tuple[Box, ...], bars: tuple[Bar, ...]) -> tuple[Cable, ...]:
    box_of = {box.name: box for box in boxes}
    bar_of = {bar.name: bar for bar in bars}
    cables: list[Cable] = []
    for link in cluster.links:
        label = rate(link.bytes_per_s)
        title = f"{link.ends[0]} – {link.ends[1]}: {label}, {seconds(link.latency_s)} latency"
        ends = sorted(link.ends, key=lambda end: end in bar_of)
        if ends[0] in box_of and ends[1] in bar_of:
            cables.append(_to_switch(box_of[ends[0]], bar_of[ends[1]], label, title))
        elif ends[0] in box_of and ends[1] in box_of:
            cables.append(_between(box_of[ends[0]], box_of[ends[1]], label, title))
    return tuple(cables)


def _to_switch(box: Box, bar: Bar, label: str, title: str) -> Cable:
    x = box.x + box.width / 2
    if box.y < bar.y:
        return Cable(x, box.y + box.height, x, bar.y, label, title)
    return Cable(x, bar.y + SWITCH_HEIGHT, x, box.y, label, title)


def _between(one: Box, other: Box, label: str, title: str) -> Cable:
    """Join facing edges of two boxes."""
    if one.y == other.y:
        left, right = sorted((one, other), key=lambda box: box.x)
        y = left.y + left.height / 2
        return Cable(left.x + left.width, y, right.x, y, label, title)
    upper, lower = sorted((one, other), key=lambda box: box.y)
    return Cable(
        upper.x + upper.width / 2, upper.y + upper.height, lower.x + lower.width / 2, lower.y, label, title
    )


def _link_kinds(cluster: Cluster) -> tuple[LinkKind, ...]:
    kind_of = dict.fromkeys(cluster.switches, "switch")
    kind_of |= {host.name: "host" for host in cluster.hosts}
    kind_of |= {device.name: "device" for host in cluster.hosts for device in host.devices}
    keys = sorted(
        (" – ".join(sorted(kind_of[end] for end in link.ends)), link.bytes_per_s, link.latency_s)
        for link in cluster.links
    )
    linked = {end for link in cluster.links for end in link.ends}
    kinds = [
        LinkKind(len(list(same)), ends, rate(bytes_per_s), seconds(latency_s))
        for (ends, bytes_per_s, latency_s), same in groupby(keys)
    ]
    through_memory = Counter(
        host.memory_bytes_per_s
        for host in cluster.hosts
        for device in host.devices
        if device.name not in linked
    )
    return (
        *kinds,
        *(
            LinkKind(number, "device – host, through the host’s memory", rate(bytes_per_s), "")
            for bytes_per_s, number in sorted(through_memory.items())
        ),
    )


def _caption(plan: Plan) -> str:
    """Say what every worker keeps a copy of."""
    variables = {variable.name: variable for variable in plan.variables}
    worker = next(rank for rank in plan.ranks if rank.replica is not None)
    copies = [held for held in worker.held if held.start is None]
    copied = sum(held_bytes(held, variables[held.variable]) for held in copies)
    return f"Every worker keeps its own copy of {plural(len(copies), 'variable')}, {size(copied)} together."
