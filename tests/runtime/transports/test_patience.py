import time
from collections.abc import Iterator

import pytest

from partc.runtime.errors import RankFailed
from partc.runtime.plan.program import Start
from partc.runtime.transports.patience import Patience

BUCKET = Start(4, "all_reduce", "all", "worker", "worker", ("x",), ("x",), label="bucket 4")
OTHER = Start(5, "all_reduce", "all", "worker", "worker", ("y",), ("y",))
DEADLINE_S, LONGER_S = 0.1, 0.15


def step_of(*awaited: Start) -> Iterator[Start]:
    """Yield what a step awaits, with a pause longer than the deadline behind each."""
    for start in awaited:
        yield start
        time.sleep(LONGER_S)


def test_patience_ends_at_the_deadline_and_names_the_communication() -> None:
    patience = Patience(spin_s=0.0, deadline_s=DEADLINE_S)

    with pytest.raises(RankFailed, match=r"at:  rank 3, communication bucket 4 \(4\)"):
        patience.through(step_of(BUCKET, BUCKET), rank=3)


def test_every_communication_has_the_whole_deadline() -> None:
    patience = Patience(spin_s=0.0, deadline_s=DEADLINE_S)

    patience.through(step_of(BUCKET, OTHER, BUCKET), rank=3)


def test_a_step_that_awaits_one_thing_only_has_the_whole_deadline_each_time() -> None:
    """Else a training of one AllReduce a step would end after the deadline, however well it goes."""
    patience = Patience(spin_s=0.0, deadline_s=DEADLINE_S)

    for _ in range(2):
        patience.through(step_of(BUCKET), rank=3)
