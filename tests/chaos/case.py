"""One case of a fault: start a job, hurt it at a random moment, and hold what follows to what must hold."""

import random
import signal
import time

from partc.runtime.engines.engine import find_mpiexec
from tests.chaos.faults import KILL, STOP, Fault
from tests.chaos.phases import CHECKPOINT, COLLECTIVE, IDLE, LOADING, PUSH, SEGMENT, Seen
from tests.chaos.stage import Bench, Stage
from tests.chaos.training import FOREVER, LOOK_S, OVER_S, Outcome, Training
from tests.checks.job_processes import JobProcess, is_alive

_LOADING_S, _TRAINING_S, _SAVING_S = 3.0, 1.5, 3e-3
_SHORTEST_S, _LONGEST_S = 1e-6, 1e-3  # that a process has been in a phase when it is hit
_TRIES = 100
_DEAD_S = 2.0
_AGAIN_S = 4.0
_RESTARTS = 3


def run_case(fault: Fault, stage: Stage, draw: random.Random) -> Outcome:
    """Run a case. Raises TooEarly where the training is over before."""
    bench = stage.bench(fault.bench)
    with Training(bench.plan, stage.case_folder()) as training:
        if fault.is_hydras:
            training.environment["PARTC_MPIEXEC"] = find_mpiexec()
        if fault.then == "resumes":
            restarts = 0 if fault.hits_launcher else _RESTARTS
            training.begin_saving(bench.steps, bench.save_every, "--restarts", str(restarts))
        else:
            training.begin(FOREVER)
        aimed = draw.choice(_phases(fault))
        _wait_until_it_runs(aimed, training, draw)
        victims = _victims(fault, training, draw)  # and a look at who is there, before the signal
        seen = Seen(_hit_member(victims[-1], training), training.checkpoints)
        _wait_for(aimed, seen, training, draw)
        training.send(victims, fault.signal)
        begun_s = time.monotonic()
        hit = _phase_hit(fault, victims[-1], seen)
        failures = [] if fault.hits_launcher and fault.signal == KILL else _told(fault, victims, training)
        told_s = time.monotonic() - begun_s
        if not failures and fault.tells_place and seen.note is not None:
            failures += _misplaced(seen.note, training)
        if fault.signal == STOP:
            training.send(victims, signal.SIGCONT)  # fenced: it may harm nothing
        if not failures:
            failures += _AFTER[fault.then](fault, training, bench, draw)
        failures += training.left()
        if failures:
            failures.append(training.told[-800:])
        names = ", ".join(victim.name or victim.role for victim in victims)
        return Outcome(names, f"aimed at: {aimed}", told_s, tuple(failures), hit=hit, aimed=aimed)


def _phases(fault: Fault) -> list[str]:
    """Return the phases that its victim comes to."""
    phases = [LOADING, IDLE, SEGMENT, COLLECTIVE]
    phases += [PUSH] if fault.bench != "AllReduce" else []
    return phases + ([CHECKPOINT] if fault.then == "resumes" else [])


def _wait_until_it_runs(aimed: str, training: Training, draw: random.Random) -> None:
    """Wait until every process has a keeper, or until there is progress, and some time more."""
    if aimed == LOADING:
        training.until(lambda: len(training.processes("member")) >= 3)
        time.sleep(draw.uniform(0, _LOADING_S))
    else:
        training.until(lambda: training.step)
        time.sleep(draw.uniform(0, _TRAINING_S))


def _wait_for(aimed: str, seen: Seen, training: Training, draw: random.Random) -> None:
    """Wait until the victim is in a phase, or writes a checkpoint."""
    if aimed == CHECKPOINT:
        training.until(lambda: seen.writes_checkpoint, look_s=0.0)
        time.sleep(draw.uniform(0, _SAVING_S))
    elif aimed != LOADING:
        dwell_s = _SHORTEST_S * (_LONGEST_S / _SHORTEST_S) ** draw.random()
        seen.await_phase(aimed, dwell_s, _TRIES)


def _hit_member(victim: JobProcess, training: Training) -> JobProcess:
    """Return whose phase counts: the victim's, its keeper's member's, or the first one's of the job."""
    members = training.processes("member")
    of_name = [member for member in members if member.name == victim.name]
    return next(iter(of_name or members), victim)


def _phase_hit(fault: Fault, victim: JobProcess, seen: Seen) -> str:
    """Return in which phase the victim was; if it is dead it notes no more."""
    deadline_s = time.monotonic() + _DEAD_S
    while fault.signal == KILL and is_alive(victim.process) and time.monotonic() < deadline_s:
        pass
    return seen.phase


def _misplaced(note: tuple[int, str, bool], training: Training) -> list[str]:
    """Return what is wrong with the place that was told, against what the victim itself noted last."""
    step, at, _ = note
    place = f"step {step}, {at}" if step else at
    return [] if place in training.told else [f"it was hit in {place}, and another place was told"]


def _victims(fault: Fault, training: Training, draw: random.Random) -> list[JobProcess]:
    training.until(lambda: training.processes("member"))
    if fault.hits_launcher:
        assert training.launcher is not None
        return [JobProcess(training.launcher.pid, "launcher")]
    chosen = draw.sample(training.processes(fault.role, fault.part), fault.victims)
    if fault.with_keeper:
        names = {victim.name for victim in chosen}
        chosen = [keeper for keeper in training.processes("keeper") if keeper.name in names] + chosen
    return chosen


def _told(fault: Fault, victims: list[JobProcess], training: Training) -> list[str]:
    """Wait until the fault is told; return what is wrong with that."""
    begun_s = time.monotonic()
    names = [victim.name for victim in victims]
    goes_on = fault.then == "goes on"
    if goes_on:
        names = [name.replace("worker-", "worker ") for name in names]
    while (passed_s := time.monotonic() - begun_s) < OVER_S:
        said = training.told
        if fault.is_told(names, training.log if goes_on else said):
            late = passed_s > fault.within_s
            return [f"told after {passed_s:.1f} s, {fault.within_s:.0f} s are the limit"] if late else []
        if "\n  fix:" in said or ": restart 1 of" in said:
            return [f"the wrong one was named: {', '.join(names) or fault.role} was hit"]
        if training.is_over and said == training.told:
            return ["it ended without a word"]
        time.sleep(LOOK_S)
    return [f"nothing was told for {OVER_S:.0f} s"]


def _resumes(fault: Fault, training: Training, bench: Bench, draw: random.Random) -> list[str]:
    failures: list[str] = []
    if fault.again:
        time.sleep(draw.uniform(0, _AGAIN_S))
        if others := training.processes(fault.role, fault.part):
            training.send([draw.choice(others)], fault.signal)
    if fault.hits_launcher:
        failures = training.end(-KILL if fault.signal == KILL else 128 + fault.signal) + training.left()
        training.begin_saving(bench.steps, bench.save_every, "--resume")
    failures += training.end(0)
    return failures or training.differences(bench.expected)


def _goes_on(fault: Fault, training: Training, bench: Bench, draw: random.Random) -> list[str]:
    before, deadline_s = training.step, time.monotonic() + 20
    while training.step <= before:
        if time.monotonic() > deadline_s:
            return ["the others did not train on"]
        time.sleep(0.05)
    assert training.launcher is not None
    training.launcher.send_signal(signal.SIGTERM)
    return training.end(128 + signal.SIGTERM)


def _ends(fault: Fault, training: Training, bench: Bench, draw: random.Random) -> list[str]:
    if not fault.hits_launcher:
        return training.end(1)
    return training.end(-KILL if fault.signal == KILL else 128 + fault.signal)


_AFTER = {"resumes": _resumes, "goes on": _goes_on, "ends": _ends}
