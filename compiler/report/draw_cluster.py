"""The cluster as a picture: hosts around their switches, what each holds, how wide the links are.

    ┌ host ┐ ┌ host ┐      first half of the hosts
    └──┬───┘ └──┬───┘
    ═══╧════════╧═══       a bar per switch
    ┌──┴───┐ ┌──┴───┐      second half
    └──────┘ └──────┘

Coordinates are in the units of the viewBox. Beyond MAX_HOSTS the rest is counted, not drawn. Switches between
devices of one host are counted in its box.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import ceil

import networkx as nx

from partc.compiler.report.describe_servers import ServerContents, describe_contents, describe_copies
from partc.compiler.report.units import plural, rate, seconds, shorten, size
from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.machines import Host
from partc.runtime.plan.program import Plan

WIDTH = 1080
GAP = 20
CABLE_GAP = 104  # between hosts that a link joins directly, so that its label fits
MAX_HOSTS = 8
COLUMNS = 4
WIDEST_HOST = 520
LINE = 19
CHARACTER, BOLD_CHARACTER = 8.0, 9.8  # widths of text in a box
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
    contents: ServerContents
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
    hosts = cluster.hosts[:MAX_HOSTS]
    within = _switches_within(cluster)
    between = [name for name in cluster.switches if name not in within]
    inside = Counter(within.values())
    grid = _lay_out(hosts, plan, cluster, len(between))
    boxes = tuple(
        _box(host, plan, *grid.corner(index), grid, inside[host.name]) for index, host in enumerate(hosts)
    )
    bars = tuple(
        Bar(grid.height + CABLE + index * (SWITCH_HEIGHT + GAP), shorten(name, 60))
        for index, name in enumerate(between)
    )
    bottoms = [box.y + box.height for box in boxes] + [bar.y + SWITCH_HEIGHT for bar in bars]
    return Picture(
        width=WIDTH,
        height=max(bottoms),
        boxes=boxes,
        cables=_cables(cluster, boxes, dict(zip(between, bars, strict=True))),
        bars=bars,
        left_out=len(cluster.hosts) - len(hosts),
        links=_link_kinds(cluster),
        caption=describe_copies(plan),
    )


@dataclass(frozen=True, slots=True)
class _Grid:
    """Where hosts stand: all boxes are of one size."""

    columns: int
    width: float
    height: float
    gap: float
    between: float  # rows

    def corner(self, index: int) -> tuple[float, float]:
        """Return the upper left corner of a host's box."""
        row, column = divmod(index, self.columns)
        used = self.columns * self.width + (self.columns - 1) * self.gap
        return (WIDTH - used) / 2 + column * (self.width + self.gap), row * (self.height + self.between)

    @property
    def chips_in_a_row(self) -> int:
        return max(1, int((self.width - 2 * PADDING + CHIP_GAP) // (CHIP_WIDTH + CHIP_GAP)))

    @property
    def characters(self) -> int:
        """Return how many fit into a box's line."""
        return int((self.width - 2 * PADDING - 8) / CHARACTER)


def _switches_within(cluster: Cluster) -> dict[str, str]:
    """Return the switches that join devices of one host and no other, with that host."""
    host_of = {device.name: host.name for host in cluster.hosts for device in host.devices}
    devices = set(host_of)
    host_of |= {host.name: host.name for host in cluster.hosts}
    switched = nx.Graph()
    switched.add_nodes_from(cluster.switches)
    switched.add_edges_from(link.ends for link in cluster.links if set(link.ends) <= set(cluster.switches))
    within: dict[str, str] = {}
    for group in nx.connected_components(switched):
        ends = {end for link in cluster.links if group & set(link.ends) for end in link.ends} - group
        hosts = {host_of[end] for end in ends}
        if len(hosts) == 1 and ends & devices:
            within |= dict.fromkeys(group, hosts.pop())
    return within


def _lay_out(hosts: Sequence[Host], plan: Plan, cluster: Cluster, bars: int) -> _Grid:
    host_names = {host.name for host in cluster.hosts}
    joined = any(host_names.issuperset(link.ends) for link in cluster.links)
    columns = min(2 if joined else COLUMNS, len(hosts))
    gap = CABLE_GAP if joined else GAP
    width = min(WIDEST_HOST, (WIDTH - gap * (columns - 1)) / columns)
    row_gap = 3.0 * GAP
    if bars:
        row_gap = 2 * CABLE + (SWITCH_HEIGHT + GAP) * bars - GAP
    unknown = _Grid(columns, width, 0.0, gap, row_gap)
    return replace(unknown, height=max(_box_height(host, plan, unknown) for host in hosts))


def _box_height(host: Host, plan: Plan, grid: _Grid) -> float:
    chip_rows = ceil(len(host.devices) / grid.chips_in_a_row)
    contents = describe_contents(host.name, plan, grid.characters)
    return _chips_top(contents) + chip_rows * (CHIP_HEIGHT + CHIP_GAP) + LINE + PADDING


def _chips_top(contents: ServerContents) -> float:
    return 3 * PADDING + LINE * (2 + len(contents.lines)) + 4


def _box(host: Host, plan: Plan, x: float, y: float, grid: _Grid, switches: int) -> Box:
    contents = describe_contents(host.name, plan, grid.characters)
    memory = size(host.memory_bytes)
    return Box(
        x=x,
        y=y,
        width=grid.width,
        height=grid.height,
        name=shorten(host.name, int((grid.characters - len(memory) - 2) * CHARACTER / BOLD_CHARACTER)),
        memory=memory,
        contents=contents,
        chips=_chips(host, plan, x + PADDING, y + _chips_top(contents), grid),
        inner_link=shorten(_profiles(host, switches), grid.characters),
    )


def _chips(host: Host, plan: Plan, left: float, top: float, grid: _Grid) -> tuple[Chip, ...]:
    rank_of = {rank.device: rank.rank for rank in plan.ranks if rank.replica is not None}
    chips: list[Chip] = []
    for index, device in enumerate(host.devices):
        row, column = divmod(index, grid.chips_in_a_row)
        threads = f", {plural(device.threads, 'thread')}" if device.kind == "cpu" else ""
        chips.append(
            Chip(
                x=left + column * (CHIP_WIDTH + CHIP_GAP),
                y=top + row * (CHIP_HEIGHT + CHIP_GAP),
                name=shorten(device.name.removeprefix(f"{host.name}/"), int(CHIP_WIDTH / BOLD_CHARACTER)),
                rank=f"rank {rank_of[device.name]}",
                title=f"{device.name}: {device.profile}{threads}",
            )
        )
    return tuple(chips)


def _profiles(host: Host, switches: int) -> str:
    profiles = Counter(device.profile for device in host.devices)
    inside = [f"switches inside: {switches}"] if switches else []
    return ", ".join([*(f"{number} × {name}" for name, number in sorted(profiles.items())), *inside])


def _cables(cluster: Cluster, boxes: Sequence[Box], bar_of: Mapping[str, Bar]) -> tuple[Cable, ...]:
    box_of = {host.name: box for host, box in zip(cluster.hosts, boxes, strict=False)}
    cables: list[Cable] = []
    for link in cluster.links:
        label = rate(link.bytes_per_s)
        title = f"{link.ends[0]} – {link.ends[1]}: {label}, {seconds(link.latency_s)} latency"
        ends = sorted(link.ends, key=lambda end: end in bar_of)
        if ends[0] in box_of and ends[1] in bar_of:
            cables.append(_to_switch(box_of[ends[0]], bar_of[ends[1]], label, title))
        elif ends[0] in box_of and ends[1] in box_of:
            cables.append(_cable_between(box_of[ends[0]], box_of[ends[1]], label, title))
    return tuple(cables)


def _to_switch(box: Box, bar: Bar, label: str, title: str) -> Cable:
    x = box.x + box.width / 2
    if box.y < bar.y:
        return Cable(x, box.y + box.height, x, bar.y, label, title)
    return Cable(x, bar.y + SWITCH_HEIGHT, x, box.y, label, title)


def _cable_between(one: Box, other: Box, label: str, title: str) -> Cable:
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
