"""One rank of a measurement, started by MPI:  python -m partc.runtime.jobs.probe FOLDER

Ranks compute, each alone and then all at once. Pairs exchange messages of growing sizes to and fro, the pairs
of a round at once; then all ranks sum and gather together. Times of transfers are the quickest of some
repeats, on the clock of the pair's first rank. Before each, caches are emptied: a step's messages come from
memory too.

    probe.json            what to measure
    samples.rank-R.json   what rank R measured
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import onnxruntime as ort
from mpi4py import MPI

from partc.runtime.jobs.measure import PROBE_FILE, Probe, Timing, samples_file
from partc.runtime.supervision.messages import Position
from partc.runtime.supervision.pulse import Pulse, failure_of
from partc.runtime.transports.communication import LONG_SUM_BYTES

_LONG_S = 0.2  # a message that takes so long is not repeated as often
_NAP_S = 1e-3
_PRODUCTS, _WHILE_S = 500, 0.3  # a product takes a fraction of a millisecond
_BESIDE = np.empty(1 << 26, np.uint8)  # twice a server CPU's cache


def main(argv: Sequence[str] | None = None) -> int:
    """Measure this process's part. A failure ends the whole MPI job."""
    (name,) = sys.argv[1:] if argv is None else argv
    folder, world, pulse = Path(name), MPI.COMM_WORLD, Pulse.of_process()
    at = f"rank {world.rank}, while measuring"
    try:
        pulse.follow(lambda: Position(at="while measuring"))
        probe = msgspec.json.decode((folder / PROBE_FILE).read_bytes(), type=Probe)
        timings = [*_computing(probe, world), *_messages(probe, world), *_together(probe, world)]
        samples_file(folder, world.rank).write_bytes(msgspec.json.encode(timings))
        pulse.end()
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        pulse.fail(failure_of(error, at))
        world.Abort(1)
    return 0


def _computing(probe: Probe, world: MPI.Intracomm) -> list[Timing]:
    """Time products of one thread: the median alone, and the mean of a while in which all compute."""
    threads, alone_s = probe.threads[world.rank], 0.0
    for rank in range(world.size):
        _meet(world)
        if rank == world.rank and threads:
            multiply = _multiplication(probe.product)
            alone_s = statistics.median(_passed_s(multiply) for _ in range(_PRODUCTS))
    _meet(world)
    if not threads:
        return []
    with ThreadPoolExecutor(threads) as pool:
        crowded_s = statistics.mean(
            pool.map(_mean_s, [_multiplication(probe.product) for _ in range(threads)])
        )
    ends = (world.rank, world.rank)
    return [Timing("alone", ends, 0, alone_s), Timing("crowded", ends, 0, crowded_s)]


def _multiplication(model: bytes) -> Callable[[], object]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    factors = {factor.name: np.ones(factor.shape, np.float32) for factor in session.get_inputs()}
    return partial(session.run, None, factors)


def _mean_s(action: Callable[[], object]) -> float:
    """Return how long an action takes on average if it is repeated for a while."""
    begun_s, count = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - begun_s) < _WHILE_S or not count:
        action()
        count += 1
    return passed_s / count


def _passed_s(action: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    action()
    return time.perf_counter() - begun_s


def _messages(probe: Probe, world: MPI.Intracomm) -> list[Timing]:
    timings: list[Timing] = []
    for pairs in probe.rounds:
        for nbytes in probe.message_bytes:
            _meet(world)
            pair = next((pair for pair in pairs if world.rank in pair), None)
            if pair is None:
                continue
            sent, received = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
            is_first = world.rank == pair[0]
            other = pair[1] if is_first else pair[0]

            def go_and_return(
                sent: np.ndarray = sent,
                received: np.ndarray = received,
                other: int = other,
                is_first: bool = is_first,
            ) -> None:
                if is_first:
                    world.Send(sent, other)
                world.Recv(received, other)
                if not is_first:
                    world.Send(sent, other)

            seconds = _quickest(go_and_return, probe.repeats, world, other) / 2
            if is_first:
                timings.append(Timing("message", pair, nbytes, seconds))
    return timings


def _together(probe: Probe, world: MPI.Intracomm) -> list[Timing]:
    timings: list[Timing] = []
    for nbytes in probe.together_bytes:
        values = np.zeros(nbytes // 4, np.float32)
        summed = np.empty_like(values)
        own = np.zeros(nbytes // 4 // world.size, np.float32)
        whole = np.empty(own.size * world.size, np.float32)

        def add(
            values: np.ndarray = values,
            summed: np.ndarray = summed,
            own: np.ndarray = own,
            whole: np.ndarray = whole,
        ) -> None:
            """Sum as training does: transports/mpi_dense.py."""
            if world.size == 2 or values.nbytes < LONG_SUM_BYTES:
                world.Allreduce(values, summed)
            else:
                world.Reduce_scatter_block(values[: whole.size], own)
                world.Allgather(own, whole)

        actions: tuple[tuple[Literal["all_reduce", "all_gather"], Callable[[], None]], ...] = (
            ("all_reduce", add),
            ("all_gather", lambda o=own, w=whole: world.Allgather(o, w)),  # type: ignore[misc]
        )
        for kind, action in actions:
            _meet(world)
            seconds = _quickest(action, probe.repeats, world, None)
            if world.rank == 0:
                timings.append(Timing(kind, (0, world.size - 1), nbytes, seconds))
    return timings


def _meet(world: MPI.Intracomm) -> None:
    """Wait for all ranks asleep: MPI's own waiting takes a core from those who measure."""
    arrived = world.Ibarrier()
    while not arrived.Test():
        time.sleep(_NAP_S)


def _quickest(action: Callable[[], None], repeats: int, world: MPI.Intracomm, other: int | None) -> float:
    """Return the least time of an action. All that take part agree after the first how often it is made."""
    best_s = _timed(action)
    slow = np.array([best_s > _LONG_S], np.int32)
    if other is None:
        world.Bcast(slow, 0)
    elif world.rank < other:
        world.Send(slow, other)
    else:
        world.Recv(slow, other)
    for _ in range(1 if slow[0] else repeats - 1):
        best_s = min(best_s, _timed(action))
    return best_s


def _timed(action: Callable[[], None]) -> float:
    _BESIDE.fill(0)
    return _passed_s(action)


if __name__ == "__main__":
    sys.exit(main())
