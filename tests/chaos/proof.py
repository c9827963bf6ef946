"""All that is proven, as data: scenarios, each of a row of the proof in docs/faults.md."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.chaos.case import run_case
from tests.chaos.faults import FAULTS
from tests.chaos.stage import Stage
from tests.chaos.training import Outcome


@dataclass(frozen=True)
class Scenario:
    """`cases`: how many, drawn differently. `run`: raises TooEarly where nothing could be tried."""

    row: str
    name: str
    run: Callable[[Stage, random.Random], Outcome]
    cases: int = 1


SCENARIOS = (*(Scenario(fault.row, fault.name, partial(run_case, fault), fault.weight) for fault in FAULTS),)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
