"""A member's notes of where it is: a word at every instruction, which its keeper can read when it is dead."""

from collections.abc import Sequence

from partc.runtime.execution.executor import Enter
from partc.runtime.plan.program import Instruction, Run, Start, Store, Wait
from partc.runtime.supervision.messages import Position
from partc.runtime.supervision.track_memory import (
    AWAITS,
    GOES_ON,
    HEAD_BYTES,
    PLACE_BITS,
    SIZE_BYTES,
    own_memory,
    read_note,
)

_LONGEST = 200  # letters of a place


class Track:
    """Notes where one member is."""

    def __init__(self) -> None:
        self._memory = own_memory()
        self._word = memoryview(self._memory)[:8].cast("q")
        self._places: dict[str, int] = {}
        self._end = HEAD_BYTES
        self._step = 0

    def place(self, at: str, awaits: bool = False) -> int:
        """Return the number of a place: 0, which is none, if there is no room for more of them."""
        line = (AWAITS if awaits else GOES_ON) + at[:_LONGEST].replace("\n", " ").replace("\0", " ")
        if line not in self._places:
            encoded = f"{line}\n".encode(errors="replace")
            if self._end + len(encoded) >= SIZE_BYTES:
                return 0
            self._memory[self._end : self._end + len(encoded)] = encoded
            self._end += len(encoded)
            self._places[line] = len(self._places) + 1
        return self._places[line]

    def begin(self, step: int, place: int) -> None:
        """Note that a step begins, and where."""
        self._step = step << PLACE_BITS
        self.enter(place)

    def enter(self, place: int) -> None:
        """Note a place of the same step."""
        self._word[0] = self._step | place

    def through(self, program: Sequence[Instruction]) -> Enter:
        """Return what notes a program's instructions by their numbers; the one behind the last is its end."""
        starts = [instruction for instruction in program if isinstance(instruction, Start)]
        labels = {s.tag_id: f"communication {s.label or s.kind} ({s.tag_id})" for s in starts}
        places = [self._place_of(instruction, labels) for instruction in program]
        places.append(self.place("communications at the end of the step", awaits=True))
        word = self._word

        def enter(index: int) -> None:
            word[0] = self._step | places[index]

        return enter

    def position(self, device: str) -> Position:
        """Return where this member is: asked by another thread."""
        note = read_note(self._memory)
        return Position(device=device) if note is None else Position(*note, device)

    def _place_of(self, instruction: Instruction, labels: dict[int, str]) -> int:
        match instruction:
            case Run(segment=segment):
                return self.place(segment)
            case Start(tag_id=tag_id):
                return self.place(labels[tag_id])
            case Wait(tag_id=tag_id):
                return self.place(labels[tag_id], awaits=True)
            case Store():
                return self.place("moving values")
