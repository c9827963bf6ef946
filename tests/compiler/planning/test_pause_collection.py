"""The garbage collector rests while large graphs are built, and is back afterwards."""

import gc

import pytest

from partc.compiler.planning.stopwatch import paused_collection


@paused_collection()
def fail() -> None:
    assert not gc.isenabled()
    raise KeyError


def test_the_collector_is_back_even_after_an_error() -> None:
    with pytest.raises(KeyError):
        fail()

    assert gc.isenabled()


def test_a_pause_within_a_pause_does_not_end_it() -> None:
    with paused_collection():
        with paused_collection():
            pass

        assert not gc.isenabled()
