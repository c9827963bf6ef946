"""Kill and stop processes of running jobs at random, and count what must hold and does not.

python -m tests.chaos --faults 150 --seed 0           as `make chaos`
python -m tests.chaos --only "rank killed" --faults 9  one kind
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tests.builders.plans.linear_plans import linear_all_reduce
from tests.builders.plans.session_plans import additive_step, compile_sessions
from tests.chaos.case import SHARED, Outcome, run_case
from tests.chaos.faults import BY_NAME, FAULTS

# How often each kind is drawn: what users meet, most.
SHARES = {"rank killed": 8, "rank's keeper killed": 3, "launcher killed": 2, "rank stopped": 4}
_INSIDE = "PARTC_CHAOS_INSIDE"


def main() -> int:
    """Run the cases that the command line asks for; return 1 if anything did not hold."""
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help=f"one kind: {', '.join(BY_NAME)}")
    asked = parser.parse_args()
    _enter_own_shared_memory()
    kinds = [asked.only] if asked.only else [fault.name for fault in FAULTS]
    draw = random.Random(asked.seed)
    names = draw.choices(kinds, [SHARES.get(kind, 1) for kind in kinds], k=asked.faults)
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="partc-chaos.") as made:
        root = Path(made).resolve()
        plans = {
            "ranks": linear_all_reduce(root / "ranks", 4),
            "sessions": compile_sessions(additive_step(), root / "sessions", "1x3").path,
        }
        for number, name in enumerate(names):
            fault = BY_NAME[name]
            outcome = run_case(
                fault, plans[fault.plan], root / "case", random.Random(f"{asked.seed}/{number}")
            )
            outcomes[name].append(outcome)
            told = "; ".join(outcome.failures) or "held"
            print(
                f"{number} {name}, {outcome.victim}, {outcome.moment}, {outcome.told_s:.2f} s: {told}",
                flush=True,
            )
    return _summarise(outcomes)


def _summarise(outcomes: dict[str, list[Outcome]]) -> int:
    broken = 0
    print("\n| fault | cases | held | told after, median | at most |\n| --- | --- | --- | --- | --- |")
    for name in BY_NAME:
        if runs := outcomes.get(name):
            held = sum(not run.failures for run in runs)
            times = sorted(run.told_s for run in runs)
            print(f"| {name} | {len(runs)} | {held} | {times[len(times) // 2]:.1f} s | {times[-1]:.1f} s |")
            broken += len(runs) - held
    return 1 if broken else 0


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
