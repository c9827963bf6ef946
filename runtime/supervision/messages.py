"""What members of a job, their keepers and the supervisor say to each other.

A *member* is a process of the job: a rank, or a server or worker of asynchronous training.

    member -> keeper        Position   where it is, a few times a second      (a pipe, lines of JSON)
                            MemberFailure  why it stops by itself
                            Finished   that it has done what it was to do: an exit code of 0 is no sign of it
                            its place to the instruction                      (track_memory.py)
    keeper -> supervisor    Beat       its member's last position, and how long there was no sign of life
                            Printed    what its member prints
                            Ended      its member's end, before the keeper's own
                            StopRequested  somebody else asks the member to stop: a batch system, say
    supervisor -> keeper    Order      go on | stop well | end: the member; its keeper, once it is dead
"""

from typing import Literal

import msgspec

from partc.runtime.plan.record import Record

STARTER_GONE = "what started the ranks of its host is gone"  # an end's `by_keeper`


class Position(Record, frozen=True, tag="position"):
    """Where a member is. `awaits`: it has nothing to do until others have done something."""

    step: int = 0
    at: str = "while loading"
    awaits: bool = False
    device: str = ""


class MemberFailure(Record, frozen=True, tag="failure"):
    """Why a member stops by itself."""

    time_s: float  # since the epoch
    kind: str  # a class of runtime/errors.py
    what: str
    at: str
    fix: str
    is_echo: bool = False  # what others' end does to this one


class Finished(Record, frozen=True, tag="finished"):
    """A member has done what it was to do, and will end."""


class Beat(Record, frozen=True, tag="beat"):
    """A keeper is there, and its member. `still_s`: for how long the member showed no sign of life."""

    process: int
    keeper: int
    host: str
    position: Position
    still_s: float = 0.0
    segments: tuple[str, ...] = ()  # of shared memory, which others would have to remove


class Ended(Record, frozen=True, tag="ended"):
    """A member has ended. `code`: its exit code, or minus the signal's number.

    `by_keeper`: why the keeper itself ended it, if it did. `has_finished`: whether the member said so.
    """

    code: int
    time_s: float  # since the epoch
    position: Position
    peak_bytes: int
    failure: MemberFailure | None = None
    by_keeper: str = ""
    has_finished: bool = False

    @property
    def is_well(self) -> bool:
        """Whether it ended by itself when it had done what it was to do."""
        return self.code == 0 and self.has_finished


class Printed(Record, frozen=True, tag="printed"):
    """Some of what a member prints: any bytes."""

    text: bytes


class StopRequested(Record, frozen=True, tag="asked"):
    """A member's host asks it to stop, by a signal of this number."""

    signal: int


class Order(Record, frozen=True, tag="order"):
    """What the supervisor wants; `go_on` only sees whether the keeper can be reached."""

    what: Literal["go_on", "stop", "end"]


class Rendezvous(Record, frozen=True):
    """Where keepers find the supervisor: a file in the job's folder."""

    endpoints: dict[str, str]  # member -> endpoint
    beat_s: float
    patience_s: float  # how long a keeper does without a connection
    folders: tuple[str, ...] = ()  # temporary ones, to be removed by whoever outlives the launcher


Said = Position | MemberFailure | Finished
Reported = Beat | Printed | Ended | StopRequested

SAID = msgspec.json.Decoder(Said)
REPORTED = msgspec.msgpack.Decoder(Reported)
ORDER = msgspec.msgpack.Decoder(Order)
