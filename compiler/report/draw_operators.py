"""Who computes what of each operator, as pictures: flexflow.txt, figures 13 and 14.

┌───┬───┐   an operator whose samples are in two parts, from top to bottom, and another dimension in two,
│ 0 │ 1 │   from left to right: a colour for each device. Where several do the same, they share a cell.
├───┼───┤
│ 2 │ 3 │   Operators that are alike, such as the steps of a recurrence, share a picture if their
└───┴───┘   devices are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from partc.compiler.compilation import Compilation
from partc.compiler.report.device_colours import Colour, colour_devices
from partc.compiler.report.units import count, join_words, plural, shorten, some_ranges
from partc.passes.layouts.strategy_meshes import BATCH
from partc.passes.search.operators.find_groups import OperatorGroup, find_groups
from partc.passes.search.operators.read_configs import OperatorGrid, read_grids
from partc.runtime.plan.program import Rank

WIDTH = 152
TALLEST = 128
ROW = 26  # where there are few
GAP = 2  # between cells, where they are large
SMALLEST_WITH_GAP = 7
LINE, CHARACTER = 13, 7.5  # what a number in a cell takes
NAME_CHARACTERS = 20
DRAWN = 30  # others are folded away
HOSTS_TOLD = 16
NAMES_TOLD = 30


@dataclass(frozen=True, slots=True)
class Area:
    """A device's area of a cell."""

    x: float
    y: float
    width: float
    height: float
    colour: Colour
    label: str


@dataclass(frozen=True, slots=True)
class OperatorPicture:
    """An operator, or several alike on the same devices."""

    name: str
    more: str
    op: str
    divided: str
    ranks: str
    title: str
    height: float
    areas: tuple[Area, ...]


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """What a colour means."""

    rank: int
    device: str
    colour: Colour


@dataclass(frozen=True, slots=True)
class HostKey:
    """The devices of a host."""

    host: str
    devices: tuple[DeviceKey, ...]


@dataclass(frozen=True, slots=True)
class OperatorPictures:
    """Everything that the template draws. `rest`, `other_hosts`: what is folded away."""

    sentence: str
    hosts: tuple[HostKey, ...]
    other_hosts: tuple[HostKey, ...]
    drawn: tuple[OperatorPicture, ...]
    rest: tuple[OperatorPicture, ...]
    width: int = WIDTH


def draw_operators(compilation: Compilation) -> OperatorPictures | None:
    """Return a picture for each kind of operator; None where all divide samples alone among all workers."""
    if not compilation.strategy.has_meshes:
        return None
    analysis, lowered = compilation.analysis, compilation.lowered
    groups = find_groups(analysis.training, analysis.facts, analysis.main)
    grids = read_grids(analysis, lowered.decisions, lowered.meshes, groups)
    workers = [rank for rank in compilation.plan.ranks if rank.replica is not None]
    if all(_is_data_parallel(grid, len(workers)) for grid in grids):
        return None
    colours = colour_devices([rank.host for rank in workers])
    pictures = [_draw(alike, grid, workers, colours) for grid, alike in _alike(groups, grids)]
    hosts = _keys(workers, colours)
    return OperatorPictures(
        _sentence(grids, workers, len(pictures)),
        hosts[:HOSTS_TOLD],
        hosts[HOSTS_TOLD:],
        tuple(pictures[:DRAWN]),
        tuple(pictures[DRAWN:]),
    )


def _is_data_parallel(grid: OperatorGrid, workers: int) -> bool:
    return grid == OperatorGrid(((BATCH, workers),), tuple((worker,) for worker in range(workers)))


def _alike(
    groups: Sequence[OperatorGroup], grids: Sequence[OperatorGrid]
) -> list[tuple[OperatorGrid, list[OperatorGroup]]]:
    """Return the operators of one op, shape, set of dimensions and grid, in the order of their first."""
    by_grid: dict[object, tuple[OperatorGrid, list[OperatorGroup]]] = {}
    for group, grid in zip(groups, grids, strict=True):
        key = group.op, group.shape, tuple(group.splits.items()), grid
        by_grid.setdefault(key, (grid, []))[1].append(group)
    return list(by_grid.values())


def _sentence(grids: Sequence[OperatorGrid], workers: Sequence[Rank], pictures: int) -> str:
    used = {worker for grid in grids for together in grid.workers for worker in together}
    idle = [rank.rank for number, rank in enumerate(workers) if number not in used]
    shared = f", in {plural(pictures, 'picture')}" if pictures < len(grids) else ""
    unused = f" Nothing of them is computed by {_ranks(idle)}." if idle else ""
    return f"{plural(len(grids), 'operator')}{shared}, in the order of the way forward.{unused}"


def _ranks(numbers: Sequence[int]) -> str:
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {some_ranges(numbers, 3)}"


def _draw(
    alike: Sequence[OperatorGroup], grid: OperatorGrid, workers: Sequence[Rank], colours: Sequence[Colour]
) -> OperatorPicture:
    numbers = [rank.rank for rank in workers]
    names = [group.node for group in alike[:NAMES_TOLD]]
    names += [f"{count(len(alike) - len(names))} more"] * (len(alike) > len(names))
    divided, ranks = _divided(grid), _ranks([numbers[worker] for part in grid.workers for worker in part])
    height, areas = draw_grid(grid, numbers, colours)
    return OperatorPicture(
        shorten(alike[0].node, NAME_CHARACTERS),
        f"{count(len(alike) - 1)} alike" if len(alike) > 1 else "",
        alike[0].op,
        divided,
        ranks,
        f"{join_words(names)}: {divided} on {ranks}",
        height,
        areas,
    )


def _divided(grid: OperatorGrid) -> str:
    words = [
        f"{'samples' if name == BATCH else name} in\u00a0{parts}" for name, parts in grid.split if parts > 1
    ]
    repeated = len(grid.workers[0])
    if not words:
        return f"whole on each of {repeated}\u00a0devices" if repeated > 1 else "whole"
    parts = " × ".join(words)
    return f"{parts}, each part on {repeated}\u00a0devices" if repeated > 1 else parts


def draw_grid(
    grid: OperatorGrid, numbers: Sequence[int], colours: Sequence[Colour]
) -> tuple[float, tuple[Area, ...]]:
    """Return the height of a grid, and its areas: a row for each part of the samples.

    `numbers`, `colours`: of each worker.
    """
    rows = dict(grid.split).get(BATCH, 1)
    columns, together = len(grid.workers) // rows, len(grid.workers[0])
    width, height = WIDTH / columns, min(ROW * rows, TALLEST) / rows
    across, down = (GAP if side >= SMALLEST_WITH_GAP else 0 for side in (width, height))
    own, tall = (width - across) / together, height - down
    areas: list[Area] = []
    for number, part in enumerate(grid.workers):
        row, column = divmod(number, columns)
        for place, worker in enumerate(part):
            label = f"{numbers[worker]}"
            fits = tall >= LINE and own >= CHARACTER * len(label) + 2
            x, y = column * width + across / 2 + place * own, row * height + down / 2
            areas.append(Area(x, y, own, tall, colours[worker], label if fits else ""))
    return height * rows, tuple(areas)


def _keys(workers: Sequence[Rank], colours: Sequence[Colour]) -> tuple[HostKey, ...]:
    hosts: dict[str, list[DeviceKey]] = {}
    for rank, colour in zip(workers, colours, strict=True):
        hosts.setdefault(rank.host, []).append(DeviceKey(rank.rank, rank.device, colour))
    return tuple(HostKey(host, tuple(devices)) for host, devices in hosts.items())
