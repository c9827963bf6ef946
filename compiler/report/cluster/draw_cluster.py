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
from math import ceil

from partc.compiler.report.cluster.describe_links import StepLoads, name_lane, switches_within
from partc.compiler.report.cluster.describe_servers import ServerContents, describe_contents, describe_copies
from partc.compiler.report.measure_traffic import LaneLoad
from partc.compiler.report.units import percent, plural, rate, seconds, shorten, size
from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.machines import Host, Link
from partc.cost.network.topology import Lane, memory_of
from partc.runtime.plan.program import Plan

WIDTH = 1080
GAP = 20
CABLE_GAP = 150  # between hosts that a link joins directly, so that its label fits
MAX_HOSTS = 8
COLUMNS = 4
WIDEST_HOST = 520
LINE = 19
CHARACTER, BOLD_CHARACTER = 8.0, 9.8  # widths of text in a box
CHIP_WIDTH, CHIP_HEIGHT, CHIP_GAP = 72, 40, 6
PADDING = 12
SWITCH_HEIGHT = 30
CABLE = 62  # length of the line between a host and a switch
LANES_APART = 5  # the two directions of a link
THINNEST, THICKEST = 1.5, 7.0  # of a direction: the busier, the thicker


@dataclass(frozen=True, slots=True)
class Chip:
    """A device, drawn."""

    x: float
    y: float
    name: str
    rank: str
    title: str


@dataclass(frozen=True, slots=True)
class HostBox:
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
    inside: str  # the busiest link inside, and how busy it is
    inside_share: float


@dataclass(frozen=True, slots=True)
class LinkDirection:
    """What a link carries one way: `x1`, `y1` is where it comes from."""

    x1: float
    y1: float
    x2: float
    y2: float
    width: float
    amount: str
    share: str
    title: str
    anchor: str  # of its line in the table


@dataclass(frozen=True, slots=True)
class Cable:
    """A link between hosts or a host and a switch, drawn as its two directions."""

    x: float  # where its label is
    y: float
    is_level: bool
    label: str
    title: str
    directions: tuple[LinkDirection, LinkDirection]


@dataclass(frozen=True, slots=True)
class SwitchBar:
    """A switch, drawn across the picture."""

    y: float
    name: str


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that the template draws."""

    width: float
    height: float
    boxes: tuple[HostBox, ...]
    cables: tuple[Cable, ...]
    bars: tuple[SwitchBar, ...]
    left_out: int
    caption: str
    is_narrow: bool  # one host's box, which needs no more room than its own


def draw_cluster(plan: Plan, cluster: Cluster, loads: StepLoads, anchor_of: Mapping[Lane, str]) -> Picture:
    """Return the picture of a cluster under a plan, and what its links carry.

    `anchor_of`: the ids of links' lines in the table
    """
    hosts = cluster.hosts[:MAX_HOSTS]
    within = switches_within(cluster)
    between = [name for name in cluster.switches if name not in within]
    inside = Counter(within.values())
    grid = _lay_out(hosts, plan, cluster, len(between))
    boxes = tuple(
        _box(host, plan, *grid.corner(index), grid, inside[host.name], loads)
        for index, host in enumerate(hosts)
    )
    bars = tuple(
        SwitchBar(grid.height + CABLE + index * (SWITCH_HEIGHT + GAP), shorten(name, 60))
        for index, name in enumerate(between)
    )
    bottoms = [box.y + box.height for box in boxes] + [bar.y + SWITCH_HEIGHT for bar in bars]
    is_narrow = len(hosts) == 1 and not bars
    if is_narrow:
        boxes = tuple(_moved_left(box) for box in boxes)
    return Picture(
        width=grid.width if is_narrow else WIDTH,
        height=max(bottoms),
        boxes=boxes,
        cables=_cables(cluster, boxes, dict(zip(between, bars, strict=True)), loads, anchor_of),
        bars=bars,
        left_out=len(cluster.hosts) - len(hosts),
        caption=describe_copies(plan),
        is_narrow=is_narrow,
    )


def _moved_left(box: HostBox) -> HostBox:
    """Return a box at the picture's left edge."""
    return replace(box, x=0.0, chips=tuple(replace(chip, x=chip.x - box.x) for chip in box.chips))


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
    return _chips_top(contents) + chip_rows * (CHIP_HEIGHT + CHIP_GAP) + 2 * LINE + PADDING


def _chips_top(contents: ServerContents) -> float:
    return 3 * PADDING + LINE * (2 + len(contents.lines)) + 4


def _box(host: Host, plan: Plan, x: float, y: float, grid: _Grid, switches: int, loads: StepLoads) -> HostBox:
    contents = describe_contents(host.name, plan, grid.characters)
    memory = size(host.memory_bytes)
    busiest = loads.busiest_inside(host.name)
    return HostBox(
        x=x,
        y=y,
        width=grid.width,
        height=grid.height,
        name=shorten(host.name, int((grid.characters - len(memory) - 2) * CHARACTER / BOLD_CHARACTER)),
        memory=memory,
        contents=contents,
        chips=_chips(host, plan, x + PADDING, y + _chips_top(contents), grid),
        inner_link=shorten(_profiles(host, switches), grid.characters),
        inside=_inside(host.name, busiest, loads),
        inside_share=0.0 if busiest is None else loads.share(busiest.lane),
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


def _inside(host: str, busiest: LaneLoad | None, loads: StepLoads) -> str:
    if busiest is None:
        return "inside: nothing moves"
    link = "memory" if busiest.lane == memory_of(host) else "inside"
    return f"{link}: {size(busiest.bytes)}, {percent(loads.share(busiest.lane))} busy"


def _cables(
    cluster: Cluster,
    boxes: Sequence[HostBox],
    bar_of: Mapping[str, SwitchBar],
    loads: StepLoads,
    anchor_of: Mapping[Lane, str],
) -> tuple[Cable, ...]:
    box_of = {host.name: box for host, box in zip(cluster.hosts, boxes, strict=False)}
    cables: list[Cable] = []
    for link in cluster.links:
        ends = sorted(link.ends, key=lambda end: end in bar_of)
        if ends[0] in box_of and ends[1] in bar_of:
            points = _to_switch(box_of[ends[0]], bar_of[ends[1]])
        elif ends[0] in box_of and ends[1] in box_of:
            points = _between(box_of[ends[0]], box_of[ends[1]])
        else:
            continue
        cables.append(_cable(link, ends, points, loads, anchor_of))
    return tuple(cables)


Points = tuple[float, float, float, float]  # x and y of both ends


def _to_switch(box: HostBox, bar: SwitchBar) -> Points:
    x = box.x + box.width / 2
    if box.y < bar.y:
        return x, box.y + box.height, x, bar.y
    return x, box.y, x, bar.y + SWITCH_HEIGHT


def _between(one: HostBox, other: HostBox) -> Points:
    """Join facing edges of two boxes, from the one to the other."""
    if one.y == other.y:
        y = one.y + one.height / 2
        return (one.x + one.width, y, other.x, y) if one.x < other.x else (one.x, y, other.x + other.width, y)
    below = one.y < other.y
    return (
        one.x + one.width / 2,
        one.y + one.height * below,
        other.x + other.width / 2,
        other.y + other.height * (not below),
    )


def _cable(
    link: Link, ends: Sequence[str], points: Points, loads: StepLoads, anchor_of: Mapping[Lane, str]
) -> Cable:
    x1, y1, x2, y2 = points
    label = rate(link.bytes_per_s)
    title = f"{link.ends[0]} – {link.ends[1]}: {label}, {seconds(link.latency_s)} latency"
    there = _direction((ends[0], ends[1]), points, -LANES_APART, loads, anchor_of)
    back = _direction((ends[1], ends[0]), (x2, y2, x1, y1), LANES_APART, loads, anchor_of)
    return Cable((x1 + x2) / 2, (y1 + y2) / 2, y1 == y2, label, title, (there, back))


def _direction(
    lane: Lane, points: Points, aside: float, loads: StepLoads, anchor_of: Mapping[Lane, str]
) -> LinkDirection:
    x1, y1, x2, y2 = points
    level = y1 == y2
    dx, dy = (0.0, aside) if level else (aside, 0.0)
    load, share = loads.of_lane[lane], loads.share(lane)
    arrow = ("→" if x2 > x1 else "←") if level else ("↓" if y2 > y1 else "↑")
    return LinkDirection(
        x1 + dx,
        y1 + dy,
        x2 + dx,
        y2 + dy,
        THINNEST + (THICKEST - THINNEST) * min(1.0, share),
        f"{arrow} {size(load.bytes)}",
        percent(share),
        f"{name_lane(lane)}: {size(load.bytes)} in a step, "
        f"busy {seconds(load.seconds)}, {percent(share)} of it",
        anchor_of[lane],
    )
