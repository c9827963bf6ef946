"""Chains in processes of their own are walks of their own, whose best states come together."""

import time

import numpy as np

from partc.compiler.search.walk_chains import walk_chains
from tests.compiler.search.test_walk_tasks import two_layers


def test_chains_find_what_one_finds_and_more() -> None:
    of = two_layers()
    until_s = time.monotonic() + 60.0
    found = [
        walk_chains(
            of.tasks, of.space, [of.start], np.random.default_rng(3), until_s, most=100, chains=chains
        )
        for chains in (1, 3, 3)
    ]
    (alone, few), (together, many), again = found

    assert (few, many) == (100, 300)
    assert again == (together, many)
    assert together.least_s <= alone.least_s
    assert together.found != alone.found
    for state, step_s in together.found.items():
        assert of.tasks.begin(state) == step_s
