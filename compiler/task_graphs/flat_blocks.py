"""Which tasks the blocks of a step have, by how its groups are placed: compiled code over flat arrays.

    template  the tasks of a block (TaskBlock), by all that they are written by: a key
    links     which of them wait for which tasks of another block: by whose last tasks, or which gates

What is proposed to a search changes hundreds of blocks, of which nearly all are like others, or as before. So
blocks are looked up here; a template that is missing is told, for Python to write it, and links that are
missing are written.
"""

from typing import NamedTuple

import numpy as np

from partc.compiler.task_graphs.key_table import PENDING, Keys, find_key, has_room
from partc.cost.simulation.task_arrays import (
    NONE,
    FlatGraph,
    Ints,
    Links,
    Longs,
    Waiting,
    compiled,
    inner,
    write_links,
)

COMPUTING, TRANSFER, UPDATE, LAST, GATES = range(5)  # what a key is of; the first three also what a block is
KEYS_FULL, LINKS_FULL = -1, -2  # why `find_templates` could not go on; FINE otherwise
FINE = 0
DUE, LINKS_DUE = 1, 2  # of a block: all, or it has its template
LOW_BITS = 30  # of a number of bytes, as two numbers of a key


class FlatBlocks(NamedTuple):
    """What blocks are written by. Those of block b are begin[b] to begin[b + 1].

    kind      COMPUTING, TRANSFER or UPDATE
    which     the number of its way, of its tensor and whether that is made, or of its bucket
    group     of computing one; of a transfer the one that has the tensor, then those that read it
    read      of computing, by what is read: the column of Placings.wants; of a transfer, by group: the column
              of Placings.has, then of Placings.wants
    transfer  of computing, by what is read: the slot of what sends it, or NONE
    maker     likewise, of what makes it
    result    of computing, the blocks that send what it makes
    longest   int: of keys
    """

    kind: Ints
    which: Ints
    group_begin: Ints
    group: Ints
    read_begin: Ints
    read: Ints
    transfer: Ints
    maker: Ints
    result_begin: Ints
    result: Ints
    longest: int


class Placings(NamedTuple):
    """How placed groups have and want tensors, by the number of the placing, in numbers of Where.

    has          int32[placings, columns]
    has_terms    likewise: whether it is terms, which are summed for readers
    wants_begin  int32[placings, columns]: where those of `wants` begin that it wants
    wants_end    likewise
    """

    has: Ints
    has_terms: Ints
    wants_begin: Ints
    wants_end: Ints
    wants: Ints


class Templates(NamedTuple):
    """What is known of templates, by number; number 0 has no tasks.

    content     its number in the task graph
    outcome     equal where others find the same: last tasks, or gates and cuts
    last        the row of `last_tasks`, of computing
    awaited     where the numbers of its lists of awaited tasks begin in `lists`, as many as `lists_of`
    gate_begin  where the gates and cuts of a transfer begin, as many as `gates_of`
    list_begin  by list: where its rows of worker and task begin, and the last one ends
    where, gate, cut  by gate: how the tensor is wanted, the task behind it or NONE, bytes that are cut out
    """

    content: Ints
    outcome: Ints
    last: Ints
    awaited: Ints
    lists_of: Ints
    gate_begin: Ints
    gates_of: Ints
    lists: Ints
    list_begin: Ints
    worker: Ints
    task: Ints
    where: Ints
    gate: Ints
    cut: Longs
    last_tasks: Ints


class Now(NamedTuple):
    """How groups are placed, what template each block has, and which blocks are to be looked at."""

    placing: Ints
    template: Ints
    is_due: Ints
    is_changed: Ints  # as in TaskGraph.change


class Scratch(NamedTuple):
    """Room to work in."""

    key: Ints
    link_key: Ints
    gate_slot: Ints
    gate: Ints
    source: Ints
    target: Ints
    link: Ints
    missing: Ints  # keys without a template


@compiled
def find_templates(
    blocks: FlatBlocks,
    placings: Placings,
    templates: Templates,
    keys: Keys,
    links: Links,
    waiting: Waiting,
    now: Now,
    graph: FlatGraph,
    scratch: Scratch,
) -> int:
    """Give all blocks that are due their templates and links, and whoever waits for them, if they changed.

    Returns how many templates are missing, which scratch.missing has the keys of: a block without its
    template, and those behind it, stay due. Or KEYS_FULL, or LINKS_FULL.
    """
    missing = 0
    for block in range(len(blocks.kind)):
        if not now.is_due[block]:
            continue
        if not has_room(keys, blocks.longest):
            return KEYS_FULL
        gates = 0
        if blocks.kind[block] == TRANSFER:
            scratch.key[0], scratch.key[1] = TRANSFER, blocks.which[block]
            length = _put_wheres(blocks, placings, now, scratch.key, 2, block)
            length = length if length > 3 else 0
        elif blocks.kind[block] == UPDATE:
            length = _update_key(blocks, now, scratch.key, block)
        elif _transfers_are_due(blocks, waiting, now, block):
            continue
        else:
            length, gates = _computing_key(blocks, placings, templates, waiting, now, scratch, block)
        if now.is_due[block] == DUE:
            template = 0
            if length:
                key = find_key(keys, scratch.key, length)
                template = int(keys.value[key])
                if template == PENDING:
                    missing = _note(scratch.missing, missing, key)
                    continue
            _put_template(templates, waiting, now, graph, block, template)
        if _sources_are_due(waiting, now, block):
            continue
        fault = _find_links(blocks, templates, keys, links, waiting, now, scratch, block, gates)
        if fault != FINE:
            return fault
        _put_links(waiting, now, graph, scratch.link, block)
    return missing


@inner
def _note(missing: Ints, count: int, key: int) -> int:
    for known in range(count):
        if missing[known] == key:
            return count
    missing[count] = key
    return count + 1


@inner
def _transfers_are_due(blocks: FlatBlocks, waiting: Waiting, now: Now, block: int) -> bool:
    for read in range(blocks.read_begin[block], blocks.read_begin[block + 1]):
        slot = blocks.transfer[read]
        if slot != NONE and now.is_due[waiting.source[waiting.source_begin[block] + slot]] == DUE:
            return True
    return False


@inner
def _sources_are_due(waiting: Waiting, now: Now, block: int) -> bool:
    for slot in range(waiting.source_begin[block], waiting.source_begin[block + 1]):
        if now.is_due[waiting.source[slot]] == DUE:
            return True
    return False


@inner
def _put_wheres(blocks: FlatBlocks, placings: Placings, now: Now, key: Ints, begin: int, block: int) -> int:
    """Write how the tensor of a transfer is, and is wanted elsewhere, into a key; return where they end."""
    first, read = blocks.group_begin[block], blocks.read_begin[block]
    here = placings.has[now.placing[blocks.group[first]], blocks.read[read]]
    key[begin] = here
    length = begin + 1
    for reader in range(1, blocks.group_begin[block + 1] - first):
        placing, column = now.placing[blocks.group[first + reader]], blocks.read[read + reader]
        for wanted in range(placings.wants_begin[placing, column], placings.wants_end[placing, column]):
            where = placings.wants[wanted]
            is_known = where == here
            for known in range(begin + 1, length):
                is_known = is_known or key[known] == where
            if not is_known:
                key[length] = where
                length += 1
    return length


@inner
def _put_sums(blocks: FlatBlocks, placings: Placings, now: Now, key: Ints, begin: int, block: int) -> int:
    """Write, of each tensor that a group has terms of, NONE, its column, and how it is and is wanted."""
    for entry in range(blocks.result_begin[block], blocks.result_begin[block + 1]):
        sent = blocks.result[entry]
        column = blocks.read[blocks.read_begin[sent]]
        if placings.has_terms[now.placing[blocks.group[blocks.group_begin[sent]]], column]:
            key[begin], key[begin + 1] = NONE, column
            begin = _put_wheres(blocks, placings, now, key, begin + 2, sent)
    return begin


@inner
def _update_key(blocks: FlatBlocks, now: Now, key: Ints, block: int) -> int:
    key[0], key[1] = UPDATE, blocks.which[block]
    length = 2
    for group in range(blocks.group_begin[block], blocks.group_begin[block + 1]):
        key[length] = now.placing[blocks.group[group]]
        length += 1
    return length


@inner
def _computing_key(
    blocks: FlatBlocks,
    placings: Placings,
    templates: Templates,
    waiting: Waiting,
    now: Now,
    scratch: Scratch,
    block: int,
) -> tuple[int, int]:
    """Write the key of what is computed, and what it waits for: gates, which it returns the number of, and
    in scratch.link, by slot, whether for makers."""
    placing = now.placing[blocks.group[blocks.group_begin[block]]]
    slots = waiting.source_begin[block]
    for slot in range(waiting.source_begin[block + 1] - slots):
        scratch.link[slot] = 0
    gates, cut = 0, np.int64(0)
    for read in range(blocks.read_begin[block], blocks.read_begin[block + 1]):
        column, sent, maker = blocks.read[read], blocks.transfer[read], blocks.maker[read]
        for wanted in range(placings.wants_begin[placing, column], placings.wants_end[placing, column]):
            gate = NONE
            if sent != NONE:
                template = now.template[waiting.source[slots + sent]]
                begin = templates.gate_begin[template]
                for row in range(begin, begin + templates.gates_of[template]):
                    if templates.where[row] == placings.wants[wanted]:
                        gate = templates.gate[row]
                        cut += templates.cut[row]
            if gate != NONE:
                gates = _note_gate(scratch, gates, sent, int(gate))
            elif maker != NONE:
                scratch.link[maker] = 1
    key = scratch.key
    key[0], key[1], key[2], key[3] = COMPUTING, placing, blocks.which[block], gates > 0
    key[4], key[5] = cut & ((1 << LOW_BITS) - 1), cut >> LOW_BITS
    return _put_sums(blocks, placings, now, key, 6, block), gates


@inner
def _note_gate(scratch: Scratch, count: int, slot: int, gate: int) -> int:
    for known in range(count):
        if scratch.gate_slot[known] == slot and scratch.gate[known] == gate:
            return count
    scratch.gate_slot[count], scratch.gate[count] = slot, gate
    return count + 1


@inner
def _find_links(
    blocks: FlatBlocks,
    templates: Templates,
    keys: Keys,
    links: Links,
    waiting: Waiting,
    now: Now,
    scratch: Scratch,
    block: int,
    gates: int,
) -> int:
    """Write a block's links, by slot, into scratch.link; return whether there was room."""
    is_computing, template = blocks.kind[block] == COMPUTING, now.template[block]
    slots, key = waiting.source_begin[block], scratch.link_key
    for slot in range(waiting.source_begin[block + 1] - slots):
        which = 0 if is_computing else slot
        length = 2
        if which < templates.lists_of[template]:
            key[1] = templates.lists[templates.awaited[template] + which]
            if not is_computing or scratch.link[slot]:
                key[0], key[2] = LAST, templates.last[now.template[waiting.source[slots + slot]]]
                length = 3
            else:
                key[0] = GATES
                for number in range(gates):
                    if scratch.gate_slot[number] == slot:
                        key[length] = scratch.gate[number]
                        length += 1
        scratch.link[slot] = 0
        if length > 2:
            if not has_room(keys, blocks.longest):
                return KEYS_FULL
            number = find_key(keys, key, length)
            if keys.value[number] == PENDING:
                keys.value[number] = _new_links(templates, links, scratch, key, length)
            scratch.link[slot] = keys.value[number]
            if scratch.link[slot] == PENDING:
                return LINKS_FULL
    return FINE


@inner
def _new_links(templates: Templates, links: Links, scratch: Scratch, key: Ints, length: int) -> int:
    """Write links: of a list of awaited tasks with workers' last tasks, or with gates. PENDING: no room."""
    begin, end = templates.list_begin[key[1]], templates.list_begin[key[1] + 1]
    if (end - begin) * (length - 2) > len(scratch.source):
        return PENDING
    count, first, last = 0, NONE, NONE
    for row in range(begin, end):
        for number in range(2, length):
            source = key[number]
            if key[0] == LAST:
                source = templates.last_tasks[key[2], templates.worker[row]]
            if source >= 0:
                scratch.source[count], scratch.target[count] = source, templates.task[row]
                first = source if count == 0 else min(first, source)
                last = max(last, source)
                count += 1
    if count == 0:
        return 0
    if not (
        links.used[0] + 1 < len(links.first)
        and links.used[1] + last - first + 2 < len(links.target_begin)
        and links.used[2] + count < len(links.target)
    ):
        return PENDING
    return int(write_links(links, scratch.source[:count], scratch.target[:count]))


@inner
def _put_template(
    templates: Templates, waiting: Waiting, now: Now, graph: FlatGraph, block: int, template: int
) -> None:
    """Have a block be of a template; those that wait for it are due where they find something else there."""
    former = now.template[block]
    if templates.content[former] != templates.content[template]:
        now.is_changed[block] = 1
    if templates.outcome[former] != templates.outcome[template]:
        for entry in range(waiting.begin[block], waiting.begin[block + 1]):
            now.is_due[waiting.block[entry]] = DUE
    now.template[block], graph.content[block] = template, templates.content[template]
    now.is_due[block] = LINKS_DUE


@inner
def _put_links(waiting: Waiting, now: Now, graph: FlatGraph, link: Ints, block: int) -> None:
    """Have a block have links, by slot."""
    begin = waiting.source_begin[block]
    for slot in range(begin, waiting.source_begin[block + 1]):
        entry = waiting.entry[slot]
        if graph.link[entry] != link[slot - begin]:
            graph.link[entry], now.is_changed[block] = link[slot - begin], 1
    now.is_due[block] = 0
