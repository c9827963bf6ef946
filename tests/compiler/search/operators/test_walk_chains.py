"""Chains in processes of their own are walks of their own, whose best states come together."""

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from partc.compiler.search.operators.walk_chains import walk_chains, walk_rounds
from partc.compiler.search.operators.walk_tasks import BestStates, StepConfigs, TaskWalk
from tests.compiler.search.operators.test_walk_tasks import two_layers


def test_chains_find_what_one_finds_and_more() -> None:
    of = two_layers()
    until_s = time.monotonic() + 60.0

    def found_by(chains: int) -> tuple[BestStates, int]:
        best, rng = BestStates(), np.random.default_rng(3)
        tried = walk_chains(of.tasks, of.space, [[of.start]], best, rng, until_s, most=100, chains=chains)
        return best, tried

    found = [found_by(chains) for chains in (1, 3, 3)]
    (alone, few), (together, many), again = found

    assert (few, many) == (100, 300)
    assert again == (together, many)
    assert together.least_s <= alone.least_s
    assert together.seconds != alone.seconds
    for state, step_s in together.seconds.items():
        assert of.tasks.begin(state) == step_s


def test_starts_are_dealt_among_chains() -> None:
    of = two_layers()
    starts = [(config,) * 2 for config in of.space.replicas()]
    assert len(starts) >= 3
    over_s = time.monotonic()

    def found_by(dealt: list[list[StepConfigs]], chains: int) -> BestStates:
        best, rng = BestStates(), np.random.default_rng(3)
        walk_chains(of.tasks, of.space, dealt, best, rng, over_s, chains=chains)
        return best

    def rounds(chains: int) -> BestStates:
        best, rng = BestStates(), np.random.default_rng(3)
        next(walk_rounds(of.tasks, of.space, starts, best, rng, lambda _: over_s, chains=chains))
        return best

    assert set(found_by([starts[:1], starts[1:]], 1).seconds) == set(starts[:1])
    assert set(found_by([starts[:1], starts[1:]], 2).seconds) == set(starts)
    for chains in (1, 2, len(starts) + 2):
        assert set(rounds(chains).seconds) == set(starts)


def test_ctrl_c_keeps_what_all_chains_have(monkeypatch: pytest.MonkeyPatch) -> None:
    of, best, advance, here, turns = two_layers(), BestStates(), TaskWalk.advance, os.getpid(), []

    def interrupted(self: TaskWalk, *arguments: object) -> None:
        advance(self, *arguments)  # type: ignore[arg-type]
        turns.append(self)
        if os.getpid() == here and len(turns) == 2:
            os.kill(here, signal.SIGINT)

    monkeypatch.setattr(TaskWalk, "advance", interrupted)
    rng, until_s = np.random.default_rng(3), time.monotonic() + 600.0
    with pytest.raises(KeyboardInterrupt):
        walk_chains(of.tasks, of.space, [[of.start]], best, rng, until_s, chains=3)

    start_s = of.tasks.begin(of.start)
    assert start_s is not None
    assert best.least_s <= start_s
    assert len(best.seconds) > 1
    for state, step_s in best.seconds.items():
        assert of.tasks.begin(state) == step_s


def test_ctrl_c_while_chains_begin_ends_those_that_have(monkeypatch: pytest.MonkeyPatch) -> None:
    of, begin, begun = two_layers(), multiprocessing.Process.start, []

    def interrupted(self: multiprocessing.Process) -> None:
        if begun:
            raise KeyboardInterrupt
        begin(self)
        begun.append(self)

    monkeypatch.setattr("multiprocessing.context.ForkProcess.start", interrupted)
    rng, until_s = np.random.default_rng(3), time.monotonic() + 600.0
    with pytest.raises(KeyboardInterrupt):
        walk_chains(of.tasks, of.space, [[of.start]], BestStates(), rng, until_s, chains=3)

    assert not begun[0].is_alive()
