"""Hurt running jobs at random, and count what must hold and does not.

python -m tests.chaos                                       all of it, as `make chaos`: some hours
python -m tests.chaos --share 0.1 --seed 7                  a tenth of the cases, at least one of each kind
python -m tests.chaos --only "rank killed" --cases 9        one kind; give --only again for more
"""

import argparse
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from pathlib import Path

from tests.chaos.faults import KILL, STOP
from tests.chaos.phases import PHASES
from tests.chaos.proof import BY_NAME, SCENARIOS, Scenario
from tests.chaos.stage import Stage
from tests.chaos.training import SHARED, Outcome, TooEarly

_INSIDE = "PARTC_CHAOS_INSIDE"
_TRIES = 5


def main() -> int:
    """Run the cases that the command line asks for; return 1 if anything did not hold."""
    parser = argparse.ArgumentParser(
        prog="tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=sorted(BY_NAME), help="a kind of case", metavar="KIND"
    )
    parser.add_argument("--cases", type=int, help="how many of each kind")
    parser.add_argument("--share", type=float, default=1.0, help="of the cases of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long hostile bytes come")
    parser.add_argument("--list", action="store_true", help="say which kinds there are")
    asked = parser.parse_args()
    if asked.list:
        print("\n".join(f"{scenario.cases:4}  {scenario.name}" for scenario in SCENARIOS))
        return 0
    _enter_own_shared_memory()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's trainings would leave it alone
    chosen = [BY_NAME[name] for name in asked.only] if asked.only else list(SCENARIOS)
    queue = [s for s in chosen for _ in range(asked.cases or math.ceil(s.cases * asked.share))]
    random.Random(asked.seed).shuffle(queue)
    outcomes: dict[Scenario, list[Outcome]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="partc-chaos.") as made:
        stage = Stage(Path(made).resolve(), asked.minutes)
        for number, scenario in enumerate(queue):
            outcome = _run(scenario, stage, f"{asked.seed}/{number}")
            outcomes[scenario].append(outcome)
            print(f"{number} {scenario.name}: {_describe(outcome)}", flush=True)
    return _summarise(outcomes)


def _run(scenario: Scenario, stage: Stage, seed: str) -> Outcome:
    """Run a case, again where a training was over before anything could be done to it."""
    said = ""
    for attempt in range(_TRIES):
        try:
            return scenario.run(stage, random.Random(f"{seed}/{attempt}"))
        except TooEarly as error:
            said = str(error)
        except Exception as error:
            traceback.print_exc()
            return Outcome(failures=(f"{type(error).__name__}: {error}",))
    return Outcome(failures=(f"trainings were over too early: {said}",))


def _describe(outcome: Outcome) -> str:
    told = f"told after {outcome.told_s:.2f} s" if outcome.told_s else ""
    hit = f"hit: {outcome.hit}" if outcome.hit else ""
    said = [outcome.victim, outcome.moment, hit, told, outcome.figures, "; ".join(outcome.failures) or "held"]
    return ", ".join(filter(None, said))


def _summarise(outcomes: dict[Scenario, list[Outcome]]) -> int:
    broken = 0
    row = ""
    for scenario in (scenario for scenario in SCENARIOS if scenario in outcomes):
        if scenario.row != row:
            row = scenario.row
            print(f"\n{row}\n\n| fault | cases | held | told after, median | at most |")
            print("| --- | --- | --- | --- | --- |")
        runs = outcomes[scenario]
        held = sum(not run.failures for run in runs)
        broken += len(runs) - held
        times = sorted(run.told_s for run in runs if run.told_s)
        told = f"{times[len(times) // 2]:.1f} s | {times[-1]:.1f} s" if times else " | "
        print(f"| {scenario.name} | {len(runs)} | {held} | {told} |")
    for number in (KILL, STOP):
        _summarise_phases(number, [run for s, runs in outcomes.items() if s.number == number for run in runs])
    return 1 if broken else 0


def _summarise_phases(number: signal.Signals, runs: list[Outcome]) -> None:
    """Print how many of a signal's cases were aimed at each phase, hit it, and held."""
    if not runs:
        return
    print(f"\n{number.name}\n\n| phase | aimed at | hit | held, of those hit |")
    print("| --- | --- | --- | --- |")
    for phase in PHASES:
        hit = [run for run in runs if run.hit == phase]
        aimed = sum(run.aimed == phase for run in runs)
        print(f"| {phase} | {aimed} | {len(hit)} | {sum(not run.failures for run in hit)} |")


def _enter_own_shared_memory() -> None:
    """Start again where /dev/shm is this process's alone, if it may mount: others' jobs come and go there."""
    if os.environ.get(_INSIDE) or os.geteuid() != 0 or shutil.which("unshare") is None:
        return
    command = [sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
    mount = f'mount -t tmpfs chaos {SHARED} && exec "$@"'
    os.environ[_INSIDE] = "1"
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", mount, "sh", *command])


if __name__ == "__main__":
    begun_s = time.monotonic()
    code = main()
    print(f"{time.monotonic() - begun_s:.0f} s")
    sys.exit(code)
