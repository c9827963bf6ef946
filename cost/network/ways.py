"""Quickest ways through a network, and what all-to-all traffic puts on its edges.

    pieces     what is left when every bridge is removed: an edge that all ways between its sides cross
    bridges    join the pieces to a tree

         piece 0             A way climbs from piece to piece until both ends are in one, so that only
        /   |   \\            the inside of a piece is searched. Hosts behind a switch are pieces of one
    piece  piece  piece      node each, and their ways are found without a search.

Bridges: Tarjan, Information Processing Letters 2 (1974) 160-161, as networkx finds them.
"""

from collections.abc import Sequence
from typing import Any

import networkx as nx
import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Ways:
    """Answers for a graph whose nodes are numbered 0, 1, ... and whose edges have a `weight`.

    `piece_of` and `depth` are by node and by piece; the bridge above piece p leads from the node
    `port[p]` of it to the node `outer[p]`, which lies one piece nearer to the root (-1: p is a root).
    """

    def __init__(self, graph: nx.Graph) -> None:
        bridges = list(nx.bridges(graph))
        self._inside = nx.Graph(graph)
        self._inside.remove_edges_from(bridges)
        self.pieces = [sorted(piece) for piece in nx.connected_components(self._inside)]
        self.piece_of = np.zeros(len(graph), np.int64)
        for number, piece in enumerate(self.pieces):
            self.piece_of[piece] = number
        self.port = np.full(len(self.pieces), -1)
        self.outer = np.full(len(self.pieces), -1)
        self.depth = np.zeros(len(self.pieces), np.int64)
        self._inner_paths: dict[tuple[int, int], list[int]] = {}
        self._hang(bridges)
        deepest = int(self.depth.max(initial=0))
        self.levels = [np.flatnonzero(self.depth == depth) for depth in range(deepest, -1, -1)]

    def _hang(self, bridges: Sequence[tuple[int, int]]) -> None:
        """Hang every piece below the one that it is reached from, each tree from its first node."""
        beyond: dict[int, list[tuple[int, int]]] = {}
        for a, b in bridges:
            beyond.setdefault(int(self.piece_of[a]), []).append((a, b))
            beyond.setdefault(int(self.piece_of[b]), []).append((b, a))
        reached: set[int] = set()
        for root in range(len(self.pieces)):
            queue = [] if root in reached else [root]
            reached.add(root)
            for piece in queue:
                for outer, port in beyond.get(piece, ()):
                    below = int(self.piece_of[port])
                    if below not in reached:
                        reached.add(below)
                        self.port[below], self.outer[below] = port, outer
                        self.depth[below] = self.depth[piece] + 1
                        queue.append(below)

    def path(self, source: int, target: int) -> list[int]:
        """Return the nodes of the quickest way. Raises networkx.NetworkXNoPath."""
        there, back = [source], [target]
        while (ours := self.piece_of[there[-1]]) != (theirs := self.piece_of[back[-1]]):
            climbing, piece = (there, ours) if self.depth[ours] >= self.depth[theirs] else (back, theirs)
            if self.port[piece] < 0:
                raise nx.NetworkXNoPath(f"no way from node {source} to node {target}")
            climbing += self.inner_path(climbing[-1], int(self.port[piece]))[1:]
            climbing.append(int(self.outer[piece]))
        return there + self.inner_path(there[-1], back[-1])[1:] + back[-2::-1]

    def inner_path(self, source: int, target: int) -> list[int]:
        """Return the nodes of the quickest way between two nodes of one piece."""
        if source == target:
            return [source]
        key = (source, target)
        if key not in self._inner_paths:
            self._inner_paths[key] = nx.shortest_path(self._inside, source, target, weight="weight")
        return self._inner_paths[key]

    def below(self, weights: Array) -> tuple[Array, Array]:
        """Sum float64[nodes] upwards.

        Return the sum of every piece and what hangs from it, float64[pieces], and of every node and
        what hangs from it, float64[nodes].
        """
        hanging = weights.copy()
        sums = np.zeros(len(self.pieces))
        depth_of_nodes = self.depth[self.piece_of]
        for pieces in self.levels:
            nodes = np.flatnonzero(depth_of_nodes == self.depth[pieces[0]])
            np.add.at(sums, self.piece_of[nodes], hanging[nodes])
            joined = pieces[self.outer[pieces] >= 0]
            np.add.at(hanging, self.outer[joined], sums[joined])
        return sums, hanging
