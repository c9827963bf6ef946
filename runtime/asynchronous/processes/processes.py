"""The processes of an asynchronous job.

The command that starts one under its keeper, here or on another machine:

    localhost     python -m partc.runtime.supervision.keeper JOB_FOLDER NAME MODULE JOB_FOLDER PART NUMBER
    elsewhere     ssh ADDRESS "cd FOLDER && exec env NAME=VALUE.. python -m .."      same Python, same paths
                  srun --nodelist=ADDRESS .. python -m ..                          in an allocation of Slurm's

PARTC_SSH names another program that is called as ssh is. A remote process ends when its connection does.
"""

import os
import queue
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from partc.runtime.asynchronous.processes.start_check import give_up
from partc.runtime.asynchronous.sessions.session import server_name, servers_of, session_name, worker_of
from partc.runtime.engines.engine import (
    Command,
    find_engine,
    is_allocation,
    passed_on,
    rank_environment,
    start_command,
)
from partc.runtime.engines.machines import Machine, Machines
from partc.runtime.engines.rank_command import KEEPER
from partc.runtime.errors import BadUsage
from partc.runtime.jobs.launcher import NamedLine, read_lines
from partc.runtime.plan.program import Plan
from partc.runtime.transports.locked_sockets import LOCAL

MODULE = "partc.runtime.asynchronous.processes.process"
_GRACE_S = 5.0  # from a polite end to a kill


def command_for(job_folder: Path, name: str, part: str, number: int, machine: Machine) -> Command:
    """Return the command for a server or worker on a host. Raises BadUsage."""
    folder, address = str(job_folder.absolute()), machine.address
    words = ["-P", "-m", KEEPER, folder, name, MODULE, folder, part, str(number)]
    started = [machine.python or sys.executable, *words]
    if address == LOCAL:
        return Command(started)
    if address.startswith("-"):
        fix = "write a network name: what begins with a dash, ssh takes for an option"
        raise BadUsage(f"no address: {address!r}", at="cluster.json: hosts", fix=fix)
    if is_allocation() and (engine := find_engine()).kind == "srun":
        return start_command(engine, [machine.name], Machines((machine,)), words, job_folder)
    variables = [f"{variable}={value}" for variable, value in passed_on().items()]
    remote = f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*variables, *started])}"
    return Command([*_find_ssh(), address, remote])


def _find_ssh() -> list[str]:
    chosen = shlex.split(os.environ.get("PARTC_SSH", "ssh"))
    if not chosen or shutil.which(chosen[0]) is None:
        raise BadUsage(
            "no ssh was found to start processes on other machines",
            at=f"PARTC_SSH={os.environ['PARTC_SSH']}" if "PARTC_SSH" in os.environ else "PATH",
            fix="install an ssh client, or set PARTC_SSH to a program that is called as ssh is",
        )
    return chosen


class Crew:
    """The processes and what they print."""

    def __init__(self, plan: Plan, job_folder: Path, machines: Machines) -> None:
        self.lines: queue.Queue[NamedLine] = queue.Queue()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._plan = plan
        self._job_folder = job_folder
        self._machines = machines

    def start_all(self) -> None:
        """Start all servers, and the first session of every worker."""
        for rank in servers_of(self._plan):
            self._start(server_name(rank.rank), "server", rank.rank, rank.host)
        for session in range(len(self._plan.asynchronous)):
            self.start_session(session)

    def start_session(self, session: int) -> None:
        """Start the worker of a session."""
        workers = len(self._plan.asynchronous)
        host = self._plan.asynchronous[worker_of(session, workers)].host
        self._start(session_name(session, workers), "worker", session, host)

    def give_up(self, name: str) -> None:
        """Let no process wait for one that has died, or is to."""
        give_up(self._job_folder, name)

    def end(self, at_once: bool) -> None:
        """End whoever still runs: at once, if somebody has not been heard yet, who knows of no end."""
        deadline_s = time.monotonic() + (0.0 if at_once else _GRACE_S)
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str, part: str, number: int, host: str) -> None:
        machine = self._machines.of(host)
        command = command_for(self._job_folder, name, part, number, machine)
        process = subprocess.Popen(
            command.words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=rank_environment() | command.environment,
            start_new_session=True,  # a terminal's Ctrl-C is for the launcher
        )
        self.processes[name] = process
        read_lines(name, process, self.lines)
