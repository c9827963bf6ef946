"""Let a message's buffers of several micro-batches lie in one memory, where one is done with before the next.

    buffer     b#0  b#1  b#2  b#3         each is in use from the first instruction that writes one of its
    memory     b#0  b#1  b#0  b#1         values to the last that reads one, in the list that all ranks share;
                                          one more than are in use

Who only sent waits before its memory is taken again. Ranks follow the order of the list, so that what is
done with in the list is done with on each of them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from partc.runtime.plan.program import Buffer, Instruction, Run, Start, Store, Wait

# Memories that lie free: a sender then waits for the message before the last, which has long arrived. With
# none, a pipeline of two stages at 1 Gbit/s took 262 ms a step, and 228 when nothing was shared.
SPARE = 1


@dataclass(frozen=True)
class SharedBuffers:
    """Instructions in which senders wait in time, and buffers that say which memory is theirs."""

    instructions: list[Instruction]
    buffers: list[Buffer]


def share_memory(
    instructions: Sequence[Instruction],
    buffers: Sequence[Buffer],
    buffer_of: Mapping[str, str],
    alike: Iterable[Sequence[str]],
    owed: Collection[Wait],
) -> SharedBuffers:
    """Return the program with as many memories as are in use at once, and a spare one.

    buffer_of  value -> the buffer that it lies in
    alike      names of buffers that may lie in one memory, of one message each
    owed       waits that may come earlier, of those who only send
    """
    lies_in = {**buffer_of, **{buffer.name: buffer.name for buffer in buffers}}
    uses = uses_of(instructions, lies_in, owed)
    memory: dict[str, str] = {}
    before: dict[int, set[str]] = {}  # instruction -> buffers whose memory it is the first to take again
    for names in alike:
        last: dict[str, tuple[int, str]] = {}  # memory -> where its last use is, and whose
        for first, name in sorted((uses[name][0], name) for name in names if name in uses):
            free = [(end, holder, place) for place, (end, holder) in last.items() if end < first]
            if len(free) > SPARE:
                _, holder, memory[name] = min(free)
                before.setdefault(first, set()).add(holder)
            last[memory.get(name, name)] = uses[name][1], name
    return SharedBuffers(
        list(_wait_in_time(instructions, before, buffer_of, owed)),
        [msgspec.structs.replace(buffer, memory=memory.get(buffer.name)) for buffer in buffers],
    )


def uses_of(
    instructions: Sequence[Instruction], buffer_of: Mapping[str, str], owed: Collection[Wait] = ()
) -> dict[str, tuple[int, int]]:
    """Return buffer -> the places of its first and last use; waits that are `owed` are none."""
    uses: dict[str, tuple[int, int]] = {}
    started = {i.tag_id: i for i in instructions if isinstance(i, Start)}
    for place, instruction in enumerate(instructions):
        if isinstance(instruction, Wait) and instruction in owed:
            continue
        for value in _touched(instruction, started):
            if value in buffer_of:
                name = buffer_of[value]
                uses[name] = uses.get(name, (place, place))[0], place
    return uses


def _touched(instruction: Instruction, started: Mapping[int, Start]) -> Iterator[str]:
    match instruction:
        case Run(reads=reads, writes=writes):
            yield from (value for _, value in (*reads, *writes))
        case Start(reads=reads, writes=writes):
            yield from (*reads, *writes)
        case Store(source=source, target=target):
            yield from (source, target)
        case Wait(tag_id=tag_id):
            yield from _touched(started[tag_id], started)


def _wait_in_time(
    instructions: Sequence[Instruction],
    before: Mapping[int, set[str]],
    buffer_of: Mapping[str, str],
    owed: Collection[Wait],
) -> Iterator[Instruction]:
    started = {i.tag_id: i for i in instructions if isinstance(i, Start)}
    waits: dict[str, list[Wait]] = {}
    for wait in owed:
        for value in _touched(wait, started):
            waits.setdefault(buffer_of.get(value, value), []).append(wait)
    done: set[Wait] = set()
    for place, instruction in enumerate(instructions):
        for buffer in sorted(before.get(place, ())):
            for wait in waits.get(buffer, ()):
                if wait not in done:
                    done.add(wait)
                    yield wait
        if not (isinstance(instruction, Wait) and instruction in done):
            yield instruction
