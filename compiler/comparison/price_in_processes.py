"""Price changes in several processes: each compiles anew, and what one finds does not depend on another."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.sharedctypes import Synchronized

import msgspec

from partc.cost.what_if import PricedChange

MOST_PROCESSES = 4  # each has the graph, and a plan, in memory

Job = Callable[[], PricedChange]


def price_in_processes(
    jobs: Sequence[Job], show: Callable[[int], None], processes: int = 0
) -> list[PricedChange]:
    """Return what jobs find, in their order. `processes`: 0 for one a core.

    `show` is told how many are done.
    """
    count = min(processes or len(os.sched_getaffinity(0)), MOST_PROCESSES, len(jobs))
    prices: dict[int, PricedChange] = {}
    if count > 1:
        for number, priced in _found_elsewhere(jobs, count):
            prices[number] = priced
            show(len(prices))
    for number, job in enumerate(jobs):
        if number not in prices:  # there is one core, or a process was killed
            prices[number] = job()
            show(len(prices))
    return [prices[number] for number in range(len(jobs))]


def _found_elsewhere(jobs: Sequence[Job], count: int) -> Iterator[tuple[int, PricedChange]]:
    """Yield what forked processes find, as they find it: they take job after job."""
    context = multiprocessing.get_context("fork")
    following: Synchronized[int] = context.Value("i", 0)
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    processes = [
        context.Process(target=_work, args=(there, jobs, following), daemon=True) for _, there in pipes
    ]
    for process, (_, there) in zip(processes, pipes, strict=True):
        process.start()
        there.close()
    open_pipes = {here for here, _ in pipes}
    try:
        while open_pipes:
            for here in wait(list(open_pipes)):
                assert isinstance(here, Connection)
                try:
                    yield msgspec.json.decode(here.recv_bytes(), type=tuple[int, PricedChange])
                except EOFError:
                    open_pipes.remove(here)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _work(there: Connection, jobs: Sequence[Job], following: "Synchronized[int]") -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(BrokenPipeError):
        while True:
            with following.get_lock():
                number = following.value
                following.value += 1
            if number >= len(jobs):
                return
            there.send_bytes(msgspec.json.encode((number, jobs[number]())))
