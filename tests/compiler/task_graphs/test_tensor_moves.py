"""What goes between groups is what an exchange of the plan would send."""

from math import prod

import numpy as np
import pytest

from partc.compiler.task_graphs.mesh_places import MeshPlace, Where
from partc.compiler.task_graphs.tensor_moves import SentTensor, messages_between
from partc.passes.layouts.boxes import box_of
from partc.passes.layouts.layouts import Layout, Replicate, Split
from partc.passes.layouts.meshes import Mesh
from partc.runtime.plan.moves import find_moves, region_of, shape_of

HOSTS = ("a", "a", "a", "a", "b", "b", "b", "b")
SHAPE = (8, 12)
AXES = (
    (("data", 1),),
    (("data", 2),),
    (("data", 4),),
    (("data", 2), ("axis1", 2)),
    (("data", 1), ("axis1", 3)),
)
PLACEMENTS = (
    (),
    (Split(0),),
    (Split(1),),
    (Split(1, 4),),
    (Split(0), Split(1)),
    (Replicate(), Split(0)),
    (Replicate(), Split(0, 1, 8)),  # 3, 3 and 2
    (Split(1), Split(1)),
    (Split(1, 3), Split(1)),
)


def drawn(rng: np.random.Generator) -> Where:
    while True:
        axes = AXES[rng.integers(len(AXES))]
        placements = PLACEMENTS[rng.integers(len(PLACEMENTS))]
        mesh, layout = Mesh("m", axes), Layout("m", *placements)
        if len(placements) <= len(axes) and mesh.divides(layout, SHAPE):
            workers = rng.permutation(8)[: prod(size for _, size in axes)]
            return Where.of(MeshPlace.of(axes, tuple(workers.tolist())), layout.placements)


@pytest.mark.parametrize("seed", range(200))
def test_moves_are_those_of_an_exchange(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source, target = drawn(rng), drawn(rng)
    workers = tuple(dict.fromkeys((*source.place.workers, *target.place.workers)))
    regions = []
    for where in (source, target):
        place = where.place
        mesh, layout = Mesh("m", place.axes), Layout("m", *where.placements)
        boxes = {w: box_of(mesh, layout, SHAPE, mesh.coordinates(n)) for n, w in enumerate(place.workers)}
        regions.append([region_of(boxes[w]) if w in boxes else None for w in workers])
    expected: dict[tuple[int, int], int] = {}
    for move in find_moves(*regions, [HOSTS[worker] for worker in workers]):
        if move.source != move.target:
            pair = workers[move.source], workers[move.target]
            expected[pair] = expected.get(pair, 0) + 4 * prod(shape_of(move.region))

    hosts = np.array([HOSTS.index(host) for host in HOSTS], np.int32)
    found = messages_between(SentTensor.of(SHAPE, 4), source, target, hosts)
    pairs = zip(found.sources.tolist(), found.targets.tolist(), strict=True)
    assert dict(zip(pairs, found.nbytes.tolist(), strict=True)) == expected
