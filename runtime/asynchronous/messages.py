"""What the processes of asynchronous training say to each other: a small header, then raw bytes.

    worker -> servers    Begin      carry out your part of my step from here on
    any    -> any        Piece      one member's part in a communication; its values follow as frames
    worker -> chief      Ask        may I start this step?          chief -> worker   Grant
    server -> worker     Applied    everything that your step pushes is applied here (the chief is told, too)
    launcher -> servers  Gone       this worker will not come back
    launcher -> servers  Finish     write what you own, and end

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


class Ask(Record, frozen=True, tag="ask"):
    """A worker wants to start a step."""

    session: int
    step: int


class Grant(Record, frozen=True, tag="grant"):
    """A worker may start a step."""

    step: int


class Applied(Record, frozen=True, tag="applied"):
    """A server has carried out its part of a step."""

    session: int
    step: int
    server: int


class Gone(Record, frozen=True, tag="gone"):
    """A worker died."""

    session: int


class Finish(Record, frozen=True, tag="finish"):
    """No worker is left to train."""


SessionMessage = Begin | Piece | Ask | Grant | Applied | Gone | Finish

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
