"""Which values of a rank's program nobody reads behind an instruction: the executor lets them go there."""

from collections.abc import Set as AbstractSet

from partc.runtime.plan.program import Instruction, Run, Start, Store, Wait


def last_readers(program: tuple[Instruction, ...], lasting: AbstractSet[str]) -> tuple[tuple[str, ...], ...]:
    """Return, per instruction, the values that nobody reads after it.

    What a communication sends must stay until the Wait: it may still be on its way.
    """
    last: dict[str, int] = {}
    sent = {start.tag_id: start.reads for start in program if isinstance(start, Start)}
    for index, instruction in enumerate(program):
        names = sent[instruction.tag_id] if isinstance(instruction, Wait) else _names(instruction)
        for name in names:
            last[name] = index
    dying: list[list[str]] = [[] for _ in program]
    for name, index in last.items():
        if name not in lasting:
            dying[index].append(name)
    return tuple(tuple(names) for names in dying)


def _names(instruction: Instruction) -> tuple[str, ...]:
    match instruction:
        case Run(reads=reads, writes=writes):
            return tuple(value for _, value in (*reads, *writes))
        case Start(reads=reads, writes=writes):
            return (*reads, *writes)
        case Store(source=source):
            return (source,)
        case Wait():
            return ()
