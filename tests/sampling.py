"""Of many cases of one test, those that run in every `make test`; the rest run in `make test-all`."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], quick: Container[int]) -> list[Any]:
    """Return all cases, those whose place is not in `quick` marked long."""
    return [
        case if place in quick else pytest.param(*_values(case), marks=pytest.mark.long)
        for place, case in enumerate(cases)
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if type(case) is tuple else (case,)
