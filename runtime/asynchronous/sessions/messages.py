"""What the processes of asynchronous training say to each other: a small header, then raw bytes.

    worker -> servers    Begin      carry out your part of my step from here on
    any    -> any        Piece      one member's part in a communication; its values follow as frames
    server -> worker     Applied    everything that your step pushes is applied here (the chief is told, too)

The chief, the first of the servers, decides for all of them (coordinator.py):

    worker -> chief      Join       where do I begin?               chief -> servers  Open      a session
    server -> chief      Opened                                     chief -> worker   Welcome   here
    worker -> chief      Ask        may I start this step?          chief -> worker   Grant
    worker -> chief      Kept       what the worker keeps for itself after a step; its values follow
    server -> chief      ReadyToCommit                              chief -> servers  Commit    apply the push
    launcher -> chief    Lost       this session has ended          chief -> servers  Gone      forget it
    chief -> servers     Save       copy what you own, and write it
    server -> chief      ShardWritten  that is done, or failed
    launcher -> chief    End        no worker is left to train      chief -> servers  Finish    write, and end

A frame holds an array's elements in C order and nothing else: type and shape are the plan's.
"""

import msgspec

from partc.runtime.errors import RankFailed
from partc.runtime.plan.record import Record


class Begin(Record, frozen=True, tag="begin"):
    """A session's step begins. Steps count from 1."""

    session: int
    step: int


class Piece(Record, frozen=True, tag="piece"):
    """What rank `sender` supplies to rank `target` in communication `tag_id`; `rows` of row kinds."""

    session: int
    step: int
    tag_id: int
    sender: int
    target: int
    rows: int = 0


class Applied(Record, frozen=True, tag="applied"):
    """A server has carried out its part of a step."""

    session: int
    step: int
    server: int


class Join(Record, frozen=True, tag="join"):
    """A worker has started."""

    session: int


class Open(Record, frozen=True, tag="open"):
    """A session begins behind a step that its worker has trained before."""

    session: int
    step: int


class Opened(Record, frozen=True, tag="opened"):
    """A server takes part in a session."""

    session: int
    server: int


class Welcome(Record, frozen=True, tag="welcome"):
    """A worker goes on behind this step."""

    step: int


class Ask(Record, frozen=True, tag="ask"):
    """A worker wants to start a step."""

    session: int
    step: int


class Grant(Record, frozen=True, tag="grant"):
    """A worker may start a step."""

    step: int


class Kept(Record, frozen=True, tag="kept"):
    """What a worker keeps for itself after a step."""

    session: int
    step: int


class ReadyToCommit(Record, frozen=True, tag="ready"):
    """A server has all that a step pushes to it, and has written nothing yet."""

    session: int
    step: int
    server: int


class Commit(Record, frozen=True, tag="commit"):
    """Every server has all that a step pushes to it."""

    session: int
    step: int


class Lost(Record, frozen=True, tag="lost"):
    """A worker's process has ended before it had trained all steps."""

    session: int


class Gone(Record, frozen=True, tag="gone"):
    """Of a session nothing will be committed any more."""

    session: int


class Save(Record, frozen=True, tag="save"):
    """All servers have applied the same pushes. `steps`: how many steps of each worker."""

    steps: tuple[int, ...]


class ShardWritten(Record, frozen=True, tag="written"):
    """A server has written its part of a checkpoint; `fault`: what was wrong, if it could not."""

    server: int
    fault: str


class End(Record, frozen=True, tag="end"):
    """No worker is left to train. `saves`: with a checkpoint."""

    saves: bool


class Finish(Record, frozen=True, tag="finish"):
    """Nothing will be pushed any more."""


ToChief = Applied | Join | Opened | Ask | Kept | ReadyToCommit | Lost | ShardWritten | End
ToServers = Open | Commit | Gone | Save | Finish
SessionMessage = Begin | Piece | Grant | Welcome | ToServers | ToChief

_DECODER = msgspec.msgpack.Decoder(SessionMessage)


def encode_message(message: SessionMessage) -> bytes:
    """Return a message's header frame."""
    return msgspec.msgpack.encode(message)


def decode_message(frame: bytes) -> SessionMessage:
    """Parse a header frame. Raises RankFailed."""
    try:
        message: SessionMessage = _DECODER.decode(frame)
    except msgspec.MsgspecError as error:
        raise refused(f"not a message: {error}", at="the network") from error
    return message


def refused(what: str, at: str) -> RankFailed:
    """Return the error of a message that the plan does not foresee."""
    fix = "let all processes run the same plan with the same version of partc"
    return RankFailed(f"a message does not fit the plan: {what}", at=at, fix=fix)
