"""The order in which a plan's instructions are played: by when ranks come to them.

    stage0   run   start   wait  run ...     ranks that execute the same instructions are one stream. Its
    stage1   run   start   run ...           next one is played when every stream that executes it has come
    stage2   run   start   wait ...          to it: of several such the one that begins first

In the plan's own order a communication of one stage would hold up what another stage begins long before it.
"""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from partc.runtime.plan.program import Plan, Rank, numbered_instructions_of


def order_of_play(plan: Plan, begins_s: Callable[[int], float]) -> Iterator[int]:
    """Yield the numbers of all instructions that a rank executes, each before what follows it on any rank.

    `begins_s`: when an instruction can begin, by number, seconds: asked when every rank that executes it has
    executed what comes before it.
    """
    programs = _programs(plan)
    streams = [iter(program) for program in programs]
    executed_by: dict[int, list[Iterator[int]]] = {}
    for program, stream in zip(programs, streams, strict=True):
        for number in program:
            executed_by.setdefault(number, []).append(stream)
    missing = {number: len(by) for number, by in executed_by.items()}
    queue: list[tuple[float, int]] = []

    def go_on(stream: Iterator[int]) -> None:
        number = next(stream, None)
        if number is not None:
            missing[number] -= 1
            if not missing[number]:
                heappush(queue, (begins_s(number), number))

    for stream in streams:
        go_on(stream)
    while queue:
        _, number = heappop(queue)
        yield number
        for stream in executed_by[number]:
            go_on(stream)


def _programs(plan: Plan) -> list[tuple[int, ...]]:
    """Return the numbers of the instructions of every stream."""
    streams: dict[tuple[frozenset[str], frozenset[str]], Rank] = {}
    for rank in plan.ranks:
        streams.setdefault((frozenset(rank.sites), frozenset(rank.groups)), rank)
    return [tuple(number for number, _ in numbered_instructions_of(plan, rank)) for rank in streams.values()]
