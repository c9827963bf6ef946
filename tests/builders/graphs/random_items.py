"""Segments and messages at random, of three meshes that share two workers."""

from collections.abc import Mapping

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.schedule import Chunk, Communication, Item

WORKERS = {"a": (0,), "b": (1,), "both": (0, 1)}
NOWHERE: Mapping[str, object] = {}
ENDS = [{"site": a, "to": b} if a != b else {"site": a, "axes": (0,)} for a in WORKERS for b in WORKERS]


def item(site: str | None, output: str, *inputs: str, ends: Mapping[str, object] = NOWHERE) -> Item:
    """Return a segment of one node, or a message between its ends where no site is given."""
    node = gs.Node("Op", output, dict(ends), [gs.Variable(name) for name in inputs], [gs.Variable(output)])
    return Communication((node,), None) if site is None else Chunk(site, [node])


def random_items(seed: int, count: int = 40) -> tuple[LoweredGraph, list[Item]]:
    """Return items in an order in which they may be carried out, and the graph with their meshes."""
    rng = np.random.default_rng(seed)
    meshes = Meshes(tuple(Mesh(name, (("data", len(w)),), w) for name, w in WORKERS.items()))
    items: list[Item] = []
    for number in range(count):
        reads = rng.choice(number, min(number, int(rng.integers(3))), replace=False) if number else []
        is_sent = rng.random() < 0.5
        site = None if is_sent else str(rng.choice(list(WORKERS)))
        ends = ENDS[rng.integers(len(ENDS))] if is_sent else {}
        items.append(item(site, str(number), *map(str, reads), ends=ends))
    return LoweredGraph(meshes, []), items


def ends_of(one: Item) -> tuple[str, ...]:
    """Return the meshes of an item."""
    if isinstance(one, Chunk):
        return (one.site,)
    return tuple(one.nodes[0].attrs[end] for end in ("site", "to") if end in one.nodes[0].attrs)
