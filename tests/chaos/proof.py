"""All that is proven, as data: scenarios, each of a row of the proof in docs/faults.md."""

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.chaos import between_hosts, damaged, hostile, mismatched, resized, slow_network, without_end
from tests.chaos.case import run_case
from tests.chaos.faults import FAULTS
from tests.chaos.stage import Stage
from tests.chaos.training import Outcome


@dataclass(frozen=True)
class Scenario:
    """`cases`: how many, drawn differently. `run`: raises TooEarly where nothing could be tried.

    `number`: which signal hits a process in a phase of its work, if any does.
    """

    row: str
    name: str
    run: Callable[[Stage, random.Random], Outcome]
    cases: int = 1
    number: signal.Signals | None = None


SCENARIOS = (
    *(
        Scenario(fault.row, fault.name, partial(run_case, fault), fault.weight, fault.signal)
        for fault in FAULTS
    ),
    *(Scenario("checkpoint damaged", how, partial(damaged.resume_after, how), 4) for how in damaged.DAMAGES),
    *(
        Scenario("checkpoint damaged", f"disk full, {when}", partial(damaged.fill_the_disk, when), 2)
        for when in damaged.ROOM
    ),
    Scenario("resize", "other ranks, other strategies", resized.resume_on_others, 2),
    Scenario("50 kills and restarts", "50 kills and restarts", without_end.restart_often),
    Scenario("a long run", "100,000 steps, a kill every 10,000", without_end.train_long),
    Scenario("hostile bytes", "at the supervisor's port", hostile.attack),
    Scenario("hostile bytes", "at servers' ports", hostile.attack_servers),
    *(Scenario("slow", how, partial(slow_network.train_through, how)) for how in slow_network.TROUBLES),
    *(
        Scenario(
            "plan, model, version mismatch",
            f"{way} on one host{kind}",
            partial(mismatched.refuse, way, bool(kind)),
        )
        for way in mismatched.WAYS
        for kind in ("", ", asynchronous")
    ),
    *(
        Scenario("between hosts", f"{how}, between hosts", partial(between_hosts.hurt, how), 4)
        for how in between_hosts.HURTS
    ),
    Scenario("killed", "keeper killed unheard, between hosts", slow_network.kill_an_unheard_keeper, 8),
    Scenario("hung", "host frozen, and woken late", slow_network.freeze_a_host),
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
