"""Walks over operator groups' configurations in several processes, one a core, each with a seed of its own.

They are made in rounds. In the first the starts are dealt among the processes: what one start leads to takes
time, and walks that follow each other end in one place. Each later one begins at the best states of the one
before, hot again.

Processes are forked, so that each begins with the task graph, its compiled code and what is remembered of
blocks; they send their best states back as JSON. Ctrl-C ends all chains, and what they have is kept.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from multiprocessing.connection import Connection
from types import FrameType

import msgspec
import numpy as np

from partc.compiler.search.operators.walk_tasks import BestStates, StepConfigs, walk_tasks
from partc.compiler.task_graphs.step_tasks import StepTasks
from partc.passes.search.operators.operator_space import OperatorSpace

ChainProcess = tuple[multiprocessing.process.BaseProcess, Connection]

GRACE_S = 5.0  # for a chain that is interrupted
ROUNDS = (0.8, 0.2)  # of the time; one that brings nothing is the last


class WalkResult(msgspec.Struct, frozen=True):
    """What a process found."""

    states: tuple[tuple[StepConfigs, float], ...]
    proposals: int


def walk_rounds(
    tasks: StepTasks,
    space: OperatorSpace,
    starts: Sequence[StepConfigs],
    best: BestStates,
    rng: np.random.Generator,
    until: Callable[[float], float],
    show: Callable[[float], None] = lambda step_s: None,
    most: float = inf,
    chains: int = 0,
) -> Iterator[int]:
    """Walk in rounds; yield after each how many proposals it had.

    `until`: returns when a share of the time that is left then is over, on the monotonic clock.
    `best`: takes the best states, those of an interrupted round as well.
    """
    left, dealt = 1.0, _dealt(starts, chains or _cores())
    least_s = min((step_s for state in starts if (step_s := tasks.begin(state)) is not None), default=inf)
    for share in ROUNDS:
        round_best = BestStates()
        try:
            proposals = walk_chains(
                tasks, space, dealt, round_best, rng, until(share / left), show, share * most, chains
            )
        finally:
            best.add_all(round_best)
        yield proposals
        if best.least_s >= least_s:
            return
        left, least_s = left - share, best.least_s
        dealt = [best.in_order()[:2]]


def _dealt(starts: Sequence[StepConfigs], chains: int) -> list[Sequence[StepConfigs]]:
    """Deal starts among as many chains; of fewer starts each is a part of its own."""
    parts = max(1, min(chains, len(starts)))
    return [starts[first::parts] for first in range(parts)]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def walk_chains(
    tasks: StepTasks,
    space: OperatorSpace,
    starts: Sequence[Sequence[StepConfigs]],
    best: BestStates,
    rng: np.random.Generator,
    until_s: float,
    show: Callable[[float], None] = lambda step_s: None,
    most: float = inf,
    chains: int = 0,
) -> int:
    """Walk in several processes; return how many proposals were tried.

    `starts`: what chains begin at, by turns. `best`: takes the best states of all chains, interrupted ones
    as well. `most`: proposals of each chain. `chains`: 0 for one a core.
    `show` is told what this process's own chain finds.
    """
    others: list[ChainProcess] = []
    try:
        for number, own in enumerate(rng.spawn(chains or _cores())[1:], 1):
            begun = starts[number % len(starts)]
            others.append(_begin(partial(_walk, tasks, space, begun, own, until_s, most)))
        proposals = walk_tasks(tasks, space, starts[0], best, rng, until_s, show, most)
        return proposals + _collect(others, best)
    except BaseException:  # at any of these: a chain left alone would walk to the end of its time
        for other, _ in others:
            other.terminate()
        _collect(others, best, GRACE_S)
        raise


def _begin(walk: Callable[[Connection], None]) -> ChainProcess:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=walk, args=(there,), daemon=True)
    process.start()
    there.close()
    return process, here


def _collect(others: Sequence[ChainProcess], best: BestStates, grace_s: float | None = None) -> int:
    """Note what other processes found, when each is done; return how many proposals they tried.

    `grace_s`: what each that was told to end may take for it; None: as long as it likes.
    """
    proposals = 0
    for process, here in others:
        try:
            if not here.poll(grace_s):
                process.kill()
                continue
            walked = msgspec.json.decode(here.recv_bytes(), type=WalkResult)
        except EOFError:  # it was ended before it had begun
            continue
        finally:
            process.join()
        proposals += walked.proposals
        best.add_all(BestStates(dict(walked.states)))
    return proposals


def _walk(
    tasks: StepTasks,
    space: OperatorSpace,
    starts: Sequence[StepConfigs],
    rng: np.random.Generator,
    until_s: float,
    most: float,
    there: Connection,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's, which ends this one so:
    signal.signal(signal.SIGTERM, _interrupt)
    best, proposals = BestStates(), 0
    with suppress(KeyboardInterrupt):
        proposals = walk_tasks(tasks, space, starts, best, rng, until_s, most=most)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is done, and about to say so
    there.send_bytes(msgspec.json.encode(WalkResult(tuple(best.seconds.items()), proposals)))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
