"""What each rank runs and holds, in order, as columns: ranks that hold the same share a list."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from partc.compiler.report.describe_messages import Words
from partc.compiler.report.operators.columns import Names, flattened
from partc.compiler.report.operators.find_subjects import SubjectFinder
from partc.compiler.report.packed_json import Interned
from partc.runtime.plan.boxes import describe_box, is_empty, local_shape
from partc.runtime.plan.program import Plan, Run, Start, Store, Wait
from partc.runtime.plan.variables import Box

RUN, START, WAIT, STORE = range(4)
EVERYWHERE = -1  # of a Wait: whoever is in the group of its communication


@dataclass(frozen=True)
class RankColumns:
    """Columns of the ranks, of their instructions, and of the messages that these begin."""

    ranks: dict[str, object]
    instructions: dict[str, object]
    messages: dict[str, object]


def tell_ranks(
    plan: Plan,
    names: Names,
    segments: Mapping[str, int],
    subjects: SubjectFinder,
    words: Mapping[int, Words],
) -> RankColumns:
    """Return the columns. `segments`: path -> its number; `words`: of instructions, by their places."""
    numbers = names.any
    sites, groups = Interned[str](), Interned[str]()
    phrases = Interned[tuple[str, tuple[int, ...]]]()
    rows: list[tuple[int, int, int, int, int]] = []  # kind, site or group, segment or message, bytes, tag
    for place, instruction in enumerate(plan.instructions):
        match instruction:
            case Run():
                rows.append((RUN, sites(instruction.site), segments[instruction.segment], 0, 0))
            case Start():
                about = tuple(numbers[name] for name in subjects.find(instruction) if name in numbers)
                text, nbytes = phrases((words[place].what, about)), instruction.payload_bytes
                rows.append((START, groups(instruction.group), text, nbytes, instruction.tag_id))
            case Wait():
                site = EVERYWHERE if instruction.site is None else sites(instruction.site)
                rows.append((WAIT, site, 0, 0, instruction.tag_id))
            case Store():
                rows.append((STORE, sites(instruction.site), 0, 0, 0))
    columns = {
        name: [row[at] for row in rows] for at, name in enumerate(("kind", "at", "what", "bytes", "tag"))
    }
    return RankColumns(
        _describe_ranks(plan, names, sites, groups),
        {**columns, "sites": sites.items, "groups": [plan.groups.get(name, ()) for name in groups.items]},
        {
            "words": [text for text, _ in phrases.items],
            "about": flattened([about for _, about in phrases.items]),
        },
    )


def _describe_ranks(
    plan: Plan, names: Names, sites: Interned[str], groups: Interned[str]
) -> dict[str, object]:
    hosts, site_sets = Interned[str](), Interned[tuple[int, ...]]()
    memberships, boxes = Interned[tuple[int, ...]](), Interned[str]()
    holdings = Interned[tuple[tuple[int, int, int], ...]]()
    shapes = {variable.name: variable for variable in plan.variables}
    shape_and_size: dict[tuple[str, Box | None], tuple[int, int]] = {}
    columns: dict[str, list[object]] = {"host": [], "device": [], "sites": [], "groups": [], "holds": []}
    known = groups.items
    for rank in plan.ranks:
        holding: list[tuple[int, int, int]] = []
        for piece in rank.pieces:
            key = piece.variable, piece.box
            if key not in shape_and_size:
                variable = shapes[piece.variable]
                elements = prod(local_shape(variable.shape, piece.box))
                part = "" if piece.box is None else describe_box(piece.box)
                shape_and_size[key] = boxes(part), elements * np.dtype(variable.dtype).itemsize
            if not is_empty(piece.box):
                holding.append((names.others[piece.variable], *shape_and_size[key]))
        columns["host"].append(hosts(rank.host))
        columns["device"].append(rank.device)
        columns["sites"].append(site_sets(tuple(sites(site) for site in rank.sites)))
        columns["groups"].append(memberships(tuple(rank.groups.get(name, -1) for name in known)))
        columns["holds"].append(holdings(tuple(holding)))
    return {
        **columns,
        "hosts": hosts.items,
        "sitesOf": site_sets.items,
        "groupsOf": memberships.items,
        "boxes": boxes.items,
        "holdings": [[number for piece in holding for number in piece] for holding in holdings.items],
    }
