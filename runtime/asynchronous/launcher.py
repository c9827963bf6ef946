"""Start servers and workers as processes of their own, and watch over them.

a worker dies without a word     the others train on; the servers forget it
a worker stops with an error     the run ends with that error
a server dies, or all workers    the run ends

The command that starts one, here or on another machine:

    localhost     python -m partc.runtime.asynchronous.process JOB_FOLDER PART NUMBER
    elsewhere     ssh ADDRESS "cd FOLDER && exec env NAME=VALUE.. python -m .."      same Python, same paths

PARTC_SSH names another program that is called as ssh is. A remote process ends when its connection does.
"""

import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import IO

from partc.runtime.asynchronous.endpoints import LOCAL, endpoints_of, is_one_machine, write_key
from partc.runtime.asynchronous.job import SessionJob, error_file, write_session_job
from partc.runtime.asynchronous.mesh import Mesh, limit_of_messages
from partc.runtime.asynchronous.messages import Finish, Gone
from partc.runtime.asynchronous.session import describe_worker, server_name, servers_of, worker_name
from partc.runtime.errors import BadUsage, RankFailed
from partc.runtime.jobs.job import first_failure
from partc.runtime.jobs.job_folder import held_folder
from partc.runtime.jobs.launcher import RANK_VARIABLES, OnProgress, progress_in, rank_environment
from partc.runtime.plan.program import Plan

MODULE = "partc.runtime.asynchronous.process"
_PASSED_ON = ("PYTHONPATH", "PATH")


def command_for(job_folder: Path, part: str, number: int, address: str) -> list[str]:
    """Return the command for a server or worker at an address. Raises BadUsage."""
    started = [sys.executable, "-m", MODULE, str(job_folder.absolute()), part, str(number)]
    if address == LOCAL:
        return started
    remote = f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*_variables(os.environ), *started])}"
    return [*_find_ssh(), address, remote]


def _variables(environment: Mapping[str, str]) -> list[str]:
    own = {name: value for name, value in environment.items() if name.startswith("PARTC_")}
    passed = {name: environment[name] for name in _PASSED_ON if name in environment}
    return [f"{name}={value}" for name, value in (RANK_VARIABLES | passed | own).items()]


def _find_ssh() -> list[str]:
    chosen = shlex.split(os.environ.get("PARTC_SSH", "ssh"))
    if not chosen or shutil.which(chosen[0]) is None:
        raise BadUsage(
            "no ssh was found to start processes on other machines",
            at=f"PARTC_SSH={os.environ['PARTC_SSH']}" if "PARTC_SSH" in os.environ else "PATH",
            fix="install an ssh client, or set PARTC_SSH to a program that is called as ssh is",
        )
    return chosen


_GRACE_S = 5.0  # from a polite end to a kill

Line = tuple[str, str | None]  # (process, what it printed; None when it ended)


def launch_sessions(
    plan: Plan,
    job_folder: Path,
    log: Path,
    addresses: Mapping[str, str],
    staleness: int | None,
    on_progress: OnProgress | None,
    timeout_s: float,
) -> tuple[str, ...]:
    """Run an asynchronous job to its end; return which workers died on the way.

    No line from any process for `timeout_s` ends the job. Raises the error of who failed first.
    """
    with (
        held_folder(Path(tempfile.gettempdir()), "partc-") as sockets_folder,
        log.open("w") as stream,
        ExitStack() as at_the_end,
    ):
        sockets = str(sockets_folder)
        endpoints = endpoints_of(plan, addresses, sockets)
        session_job = SessionJob(endpoints, limit_of_messages(plan), len(plan.asynchronous), staleness)
        write_session_job(job_folder, session_job)
        if not is_one_machine(addresses):
            write_key(job_folder)
        crew = _Crew(plan, job_folder, addresses, stream)
        at_the_end.callback(crew.end)

        @cache
        def mesh() -> Mesh:
            """Connect when there is something to tell: a server that fails to start is to say so itself."""
            return at_the_end.enter_context(closing(Mesh("launcher", session_job, job_folder, timeout_s)))

        return _Watch(plan, job_folder, crew, mesh, on_progress, timeout_s).to_the_end()


class _Crew:
    """The processes and what they print."""

    def __init__(self, plan: Plan, job_folder: Path, addresses: Mapping[str, str], log: IO[str]) -> None:
        self.lines: queue.Queue[Line] = queue.Queue()
        self.log = log
        servers = {server_name(rank.rank): ("server", rank.rank, rank.host) for rank in servers_of(plan)}
        workers = {
            worker_name(number): ("worker", number, place.host)
            for number, place in enumerate(plan.asynchronous)
        }
        commands = {
            name: command_for(job_folder, part, number, addresses.get(host, LOCAL))
            for name, (part, number, host) in (servers | workers).items()
        }
        self.processes = {name: self._start(name, command) for name, command in commands.items()}

    def end(self) -> None:
        """End whoever still runs."""
        for process in self.processes.values():
            process.terminate()
        deadline_s = time.monotonic() + _GRACE_S
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, name: str, command: list[str]) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=rank_environment(),
            start_new_session=True,
        )
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()
        return process

    def _read(self, name: str, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.put((name, line))
        self.lines.put((name, None))


class _Watch:
    """Decides what the end of a process means."""

    def __init__(
        self,
        plan: Plan,
        job_folder: Path,
        crew: _Crew,
        mesh: Callable[[], Mesh],
        on_progress: OnProgress | None,
        timeout_s: float,
    ) -> None:
        self._plan = plan
        self._folder = job_folder
        self._crew = crew
        self._mesh = mesh
        self._on_progress = on_progress
        self._timeout_s = timeout_s
        self._servers = [server_name(rank.rank) for rank in servers_of(plan)]
        self._training = {worker_name(number): number for number in range(len(plan.asynchronous))}
        self._trained: list[str] = []
        self._lost: list[str] = []

    def to_the_end(self) -> tuple[str, ...]:
        """Watch until the last worker has ended, let the servers write, and return who died."""
        while self._training:
            self._hear()
        if not self._trained:
            raise RankFailed("every worker died", at="; ".join(self._lost), fix=self._look_at_log())
        for server in self._servers:
            self._mesh().post(server, Finish())
        while self._servers:
            self._hear()
        return tuple(self._lost)

    def _hear(self) -> None:
        try:
            name, line = self._crew.lines.get(timeout=self._timeout_s)
        except queue.Empty:
            what = f"no process said anything for {self._timeout_s:.0f} s"
            raise RankFailed(what, at="the executors", fix=self._look_at_log()) from None
        if line is None:
            self._ended(name)
            return
        progress = progress_in(line)
        if progress is None:
            self._crew.log.write(f"{name}: {line}")
            self._crew.log.flush()
        elif self._on_progress is not None and name == min(self._training, key=self._training.__getitem__):
            self._on_progress(progress)

    def _ended(self, name: str) -> None:
        code = self._crew.processes[name].wait()
        if code != 0 and error_file(self._folder, name).exists():
            raise first_failure(self._folder) or AssertionError(name)
        if name in self._training:
            self._worker_ended(name, code)
        elif code == 0 and not self._training:
            self._servers.remove(name)
        else:
            raise RankFailed(f"a server died: {_how(code)}", at=name, fix=self._look_at_log())

    def _worker_ended(self, name: str, code: int) -> None:
        number = self._training.pop(name)
        if code == 0:
            self._trained.append(name)
            return
        lost = f"{describe_worker(self._plan, number)} died: {_how(code)}"
        self._lost.append(lost)
        self._crew.log.write(f"{lost}; the others train on\n")
        self._crew.log.flush()
        for server in self._servers:
            self._mesh().post(server, Gone(number))

    def _look_at_log(self) -> str:
        return f"read {self._crew.log.name}; a kill without a word is often a lack of memory"


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
