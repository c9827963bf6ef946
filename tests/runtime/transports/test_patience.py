import time

import pytest

from partc.runtime.errors import RankFailed
from partc.runtime.plan.program import Start
from partc.runtime.transports.patience import Patience

BUCKET = Start(4, "all_reduce", "all", "worker", "worker", ("x",), ("x",), label="bucket 4")


def test_patience_ends_at_the_deadline_and_names_the_communication() -> None:
    patience = Patience(spin_s=0.0, deadline_s=0.01)
    patience.wait(BUCKET, rank=3)
    time.sleep(0.02)

    with pytest.raises(RankFailed, match=r"at:  rank 3, communication bucket 4 \(4\)"):
        patience.wait(BUCKET, rank=3)


def test_every_communication_has_the_whole_deadline() -> None:
    patience = Patience(spin_s=0.0, deadline_s=0.01)
    patience.wait(BUCKET, rank=3)
    time.sleep(0.02)

    patience.wait(Start(5, "all_reduce", "all", "worker", "worker", ("y",), ("y",)), rank=3)
