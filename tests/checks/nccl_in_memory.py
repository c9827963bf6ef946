"""NCCL and the streams of CUDA among ranks of one process, in NumPy: members must ask for the same."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from partc.runtime.plan.program import Plan
from partc.runtime.transports.nccl import ChannelKey, Members, NCCLChannel, channel_keys

Operation = tuple[str, tuple[Any, ...]]
REDUCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


class Stream:
    """What has been asked of it, and how much of that is done."""

    def __init__(self, non_blocking: bool = True) -> None:
        self.asked = self.done = 0

    def wait_event(self, event: object) -> None: ...


class Event:
    def __init__(self, disable_timing: bool = True) -> None:
        self._stream, self._asked = Stream(), 0

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or Stream()
        self._asked = self._stream.asked

    @property
    def done(self) -> bool:
        return self._stream.done >= self._asked


class Communicator:
    """All members' sides: the n-th operation of each is one, carried out when all have asked for it."""

    def __init__(self, size: int) -> None:
        self.queues: list[list[tuple[Stream, Operation]]] = [[] for _ in range(size)]

    def ask(self, member: int, stream: Stream, operation: Operation) -> None:
        stream.asked += 1
        self.queues[member].append((stream, operation))
        while all(self.queues):
            together = [queue.pop(0) for queue in self.queues]
            carry_out([operation for _, operation in together])
            for each, _ in together:
                each.done += 1


def carry_out(operations: list[Operation]) -> None:
    names = [name for name, _ in operations]
    arguments = [each for _, each in operations]
    if names == ["send", "recv"]:
        (sent,), (received,) = arguments
        assert sent.nbytes == received.nbytes
        received[...] = sent
        return
    assert len(set(names)) == 1, f"members ask for different things: {names}"
    sent, received, *rest = zip(*arguments, strict=True)
    assert all(len(set(each)) == 1 for each in rest), "members disagree about root or reduction"
    assert len({array.nbytes for array in sent}) == 1
    if names[0] == "broadcast":
        (root,) = (each[0] for each in rest)
        content = sent[root].copy()
        for array in received:
            array[...] = content
        return
    (reduction, *roots) = (each[0] for each in rest)
    total = sent[0].copy()
    for array in sent[1:]:
        total = REDUCTIONS[reduction](total, array)
    for array in received if names[0] == "allreduce" else [received[roots[0]]]:
        array[...] = total


class Side:
    """One member's communicator."""

    def __init__(self, shared: Communicator, member: int) -> None:
        self._shared, self._member = shared, member

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any, stream: Stream) -> None:
            # To a send and a receive the peer is the other side.
            kept = arguments[:1] if name in ("send", "recv") else arguments
            self._shared.ask(self._member, stream, (name, kept))

        return ask


def open_channels(plan: Plan, reachable: Iterable[Members]) -> list[dict[ChannelKey, NCCLChannel]]:
    """Return each rank's channels."""
    channels: list[dict[ChannelKey, NCCLChannel]] = [{} for _ in plan.ranks]
    for group, pair in channel_keys(plan, set(reachable)):
        shared = Communicator(len(pair or group))
        for member, rank in enumerate(pair or group):
            channels[rank][group, pair] = NCCLChannel(Side(shared, member), Stream())
    return channels


def replace_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cupy and nccl.core be these."""
    cupy, cuda, nccl, core = (ModuleType(name) for name in ("cupy", "cupy.cuda", "nccl", "nccl.core"))

    @contextmanager
    def group() -> Iterator[None]:
        yield

    cuda.__dict__.update(Event=Event, Stream=Stream)
    cupy.__dict__.update(cuda=cuda)
    core.__dict__.update(SUM="sum", MAX="max", MIN="min", group=group)
    nccl.__dict__.update(core=core)
    for module in (cupy, cuda, nccl, core):
        monkeypatch.setitem(sys.modules, module.__name__, module)
