"""Two hosts of two ranks each, as network namespaces: who is named when a rank, a keeper or a host is hurt.

What is between hosts differs: nobody sees the other host's processes, and a silence may be a cut cable.
"""

import random
import re
import signal
import time
from dataclasses import dataclass
from functools import partial

from benchmarks.namespaces import namespace_hosts
from partc.runtime.supervision.process_state import remove_segments, shared_segments
from tests.chaos.faults import KILL, STOP, TOLD_WITHIN_S
from tests.chaos.slow_network import BITS_PER_S, HOSTS, NETWORK, compile_for, processes_of
from tests.chaos.stage import Stage
from tests.chaos.training import Outcome, Training
from tests.checks.job_processes import JobProcess, is_alive

_WORKERS = 2
_TRAINING_S = 1.5
_DEAF_WITHIN_S = (
    30.0  # a silent keeper whose host answers: given up after 20 s, and MPI takes up to 5 s to end
)
_WITHOUT_A_WORD = "was lost: its keeper died"


@dataclass(frozen=True)
class Hurt:
    """What is hurt of a rank: its member, its keeper, what has started it, or all of its host, janitors too.

    `told`: what the launcher says of it then, or of another rank of its host where that is hurt as a whole.
    """

    roles: tuple[str, ...]
    signal: signal.Signals
    told: str
    within_s: float = TOLD_WITHIN_S
    is_host: bool = False


HURTS = {
    "rank killed": Hurt(("member",), KILL, r"died: signal 9 \(SIGKILL\)"),
    "rank's keeper killed": Hurt(("keeper",), KILL, _WITHOUT_A_WORD),
    "MPI's proxy killed": Hurt(("proxy",), KILL, "was ended: what started", is_host=True),
    # One of them may have had a word left.
    "all of a host killed": Hurt((), KILL, f"({_WITHOUT_A_WORD}|died|was ended)", is_host=True),
    "rank's keeper stopped": Hurt(
        ("keeper",), STOP, "was lost: not heard .* its host answers", _DEAF_WITHIN_S
    ),
}


def hurt(how: str, stage: Stage, draw: random.Random) -> Outcome:
    """Hurt something of a rank drawn; it is named, and the job goes on to the same end."""
    this, rank = HURTS[how], draw.randrange(HOSTS * _WORKERS)
    with namespace_hosts(HOSTS, _WORKERS, BITS_PER_S, NETWORK) as cluster:
        bench = stage.bench("two by two", partial(compile_for, cluster))
        with Training(bench.plan, stage.case_folder()) as training:
            training.begin_saving(bench.steps, bench.save_every, "--restarts", "1", "--timeout", "300")
            training.until(lambda: training.step)
            time.sleep(draw.uniform(0, _TRAINING_S))
            victims = _victims(this, rank, training)
            lost = set() if this.roles else {s for v in victims for s in shared_segments(v.process)}
            training.send(victims, this.signal)
            begun_s = time.monotonic()
            failures = _told(this, rank, begun_s, training)
            told_s = time.monotonic() - begun_s
            training.send([v for v in victims if this.signal == STOP], signal.SIGCONT)  # fenced by now
            remove_segments(lost)  # a machine that goes takes its memory along
            failures = failures or training.end(0) + training.left()
            failures = failures or training.differences(bench.expected)
            failures += [training.told[-800:]] if failures else []
            return Outcome(f"{how}, rank {rank}", "training", told_s, tuple(failures))


def _victims(this: Hurt, rank: int, training: Training) -> list[JobProcess]:
    there = set(processes_of(NETWORK.host(1 + rank // _WORKERS)))
    if not this.roles:
        return [JobProcess(process, "any") for process in there if is_alive(process)]
    found = [p for role in this.roles for p in training.processes(role) if p.process in there]
    return [p for p in found if this.is_host or p.name == f"rank {rank}"]


def _told(this: Hurt, rank: int, begun_s: float, training: Training) -> list[str]:
    """Wait until the launcher begins again; return what is wrong with what it said."""
    training.until(lambda: ": restart 1 of" in training.told, within_s=90.0, look_s=0.01)
    passed_s = time.monotonic() - begun_s
    first = rank // _WORKERS * _WORKERS
    ranks = range(first, first + _WORKERS) if this.is_host else [rank]
    pattern = f"rank ({'|'.join(map(str, ranks))}) {this.told}.*: restart 1 of"
    failures = [] if re.search(pattern, training.told) else ["another was named"]
    late = f"told after {passed_s:.1f} s, {this.within_s:.0f} s are the limit"
    return failures + ([late] if passed_s > this.within_s else [])
