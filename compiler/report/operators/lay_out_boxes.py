"""Place the boxes of a drawing: each below what it reads, in columns where the page is wider than high.

    ┌─ column 0 ─┬─ column 1 ─┐     rank    the longest way to a box from one that reads nothing
    │   a        │   e        │     row     a rank, or a part of one of many boxes
    │  b c       │   f        │     column  as many rows as give the drawing the shape of a screen
    │   d        │  g h i     │
    └────────────┴────────────┘     Neighbours of a row are in the order of the mean place of what they read.

That is Sugiyama, Tagawa and Toda's layered drawing (IEEE Trans. SMC 11 (1981) 109-125),
without bends: edges that skip rows are drawn behind the boxes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import networkx as nx

Edge = tuple[int, int]

WIDEST = 4  # boxes of a row
SHAPE = 2.6  # rows of a column for each box of width, so that a screen is filled: boxes are wider than high
SWEEPS = 4


@dataclass(frozen=True, slots=True)
class BoxPlaces:
    """For every box its column, its row in it, and its place in the row, which has `width` boxes at most.

    Places are in halves of a box, so that rows of different lengths have one middle.
    """

    columns: tuple[int, ...]
    rows: tuple[int, ...]
    places: tuple[int, ...]
    width: int


def place_boxes(count: int, edges: Iterable[Edge]) -> BoxPlaces:
    """Return where `count` boxes go. Edges that lead back in the order of the boxes do not count."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from((source, target) for source, target in edges if source < target)
    ranks = [sorted(boxes) for boxes in nx.topological_generations(graph)]
    ranks = _pull_down(graph, ranks)
    order = _order_by_neighbours(graph, ranks)
    width = min(WIDEST, max(map(len, order), default=1))
    rows = [rank[at : at + width] for rank in order for at in range(0, len(rank), width)]
    number_of_columns = max(1, round(sqrt(len(rows) / (SHAPE * width))))
    of_column = max(1, ceil(len(rows) / number_of_columns))  # equally long: no last one of a few boxes
    columns, places_in_column, places = [0] * count, [0] * count, [0] * count
    for number, row in enumerate(rows):
        for place, box in enumerate(row):
            columns[box], places_in_column[box] = divmod(number, of_column)
            places[box] = 2 * place + (width - len(row))
    return BoxPlaces(tuple(columns), tuple(places_in_column), tuple(places), width)


def _pull_down(graph: nx.DiGraph, ranks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Move what reads nothing to just above its first reader, and what nobody reads either to the end."""
    rank_of = {box: number for number, rank in enumerate(ranks) for box in rank}
    for box in graph:
        if graph.in_degree(box) == 0 and graph.out_degree(box):
            rank_of[box] = min(rank_of[reader] for reader in graph.successors(box)) - 1
    alone = set(nx.isolates(graph))
    rank_of.update(dict.fromkeys(alone, len(ranks)))
    moved: list[list[int]] = [[] for _ in range(len(ranks) + 1)]
    for box in sorted(rank_of):
        moved[rank_of[box]].append(box)
    return [rank for rank in moved if rank]


def _order_by_neighbours(graph: nx.DiGraph, ranks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Sort the boxes of every rank by the mean place of their neighbours, down and up in turn."""
    order = [list(rank) for rank in ranks]
    place = {box: (number + 0.5) / len(rank) for rank in order for number, box in enumerate(rank)}
    for sweep in range(SWEEPS):
        neighbours = graph.predecessors if sweep % 2 == 0 else graph.successors
        for rank in order if sweep % 2 == 0 else reversed(order):
            if len(rank) < 2:
                continue
            mean = {}
            for box in rank:
                near = [place[other] for other in neighbours(box)]
                mean[box] = sum(near) / len(near) if near else place[box]
            rank.sort(key=lambda box: (mean[box], box))
            place.update((box, (number + 0.5) / len(rank)) for number, box in enumerate(rank))
    return order
