"""One case of a fault: start a job, hurt it at a random moment, and hold what follows to what must hold."""

import random
import signal
import time

from partc.runtime.engines.engine import find_mpiexec
from tests.chaos.faults import KILL, STOP, Fault
from tests.chaos.stage import Bench, Stage
from tests.chaos.training import FOREVER, LOOK_S, OVER_S, Outcome, Training
from tests.checks.job_processes import JobProcess

LOADING, TRAINING, SAVING = "loading", "training", "in a checkpoint"
_LOADING_S, _TRAINING_S, _SAVING_S = 3.0, 2.0, 3e-3
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
        moments = (LOADING, TRAINING, *([SAVING] if fault.then == "resumes" else [TRAINING]))
        moment = draw.choice(moments)
        _wait_for(moment, training, draw)
        victims = _victims(fault, training, draw)
        training.send(victims, fault.signal)
        begun_s = time.monotonic()
        failures = [] if fault.hits_launcher and fault.signal == KILL else _told(fault, victims, training)
        told_s = time.monotonic() - begun_s
        if fault.signal == STOP:
            training.send(victims, signal.SIGCONT)  # fenced: it may harm nothing
        if not failures:
            failures += _AFTER[fault.then](fault, training, bench, draw)
        failures += training.left()
        if failures:
            failures.append(training.told[-800:])
        names = ", ".join(victim.name or victim.role for victim in victims)
        return Outcome(names, moment, told_s, tuple(failures))


def _wait_for(moment: str, training: Training, draw: random.Random) -> None:
    """Wait until every process has a keeper, until there is progress, or until ranks write a checkpoint."""
    if moment == LOADING:
        training.until(lambda: len(training.processes("member")) >= 3)
        time.sleep(draw.uniform(0, _LOADING_S))
        return
    training.until(lambda: training.step)
    time.sleep(draw.uniform(0, _TRAINING_S))
    if moment == SAVING:
        training.until(lambda: any(training.checkpoints.glob(".step-*")), look_s=0.0)
        time.sleep(draw.uniform(0, _SAVING_S))


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
