import copy
import pickle
from collections.abc import Iterator

import pytest

from partc.cost.placement.problems.problem import BadPlacementProblem
from partc.passes.layouts.decide_on_servers import NotServable
from partc.runtime.errors import Cause, DoesNotFit, PartcError, Stopped

FURTHER = {DoesNotFit: {"missing_bytes": 7}, Stopped: {"signal": 15}}


def kinds_below(kind: type[PartcError]) -> Iterator[type[PartcError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from kinds_below(below)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_go_between_processes_whole(protocol: int) -> None:
    assert {BadPlacementProblem, NotServable} <= {*kinds_below(PartcError)}

    for kind in kinds_below(PartcError):
        error = kind.__new__(kind)
        PartcError.__init__(error, "what", at="where", fix="how")
        vars(error).update(FURTHER.get(kind, {}))
        error.cause = Cause("killed", "rank 3", "host1", "gpu0", 12, "segments/a.onnx", "signal 9")

        for other in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
            assert type(other) is kind
            assert str(other) == str(error)
            assert vars(other) == vars(error)
