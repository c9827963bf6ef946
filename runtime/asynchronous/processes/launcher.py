"""Start servers and workers as processes of their own, and watch over them.

a worker dies without a word, or hangs     it is started again, a few times; the others train on meanwhile
a worker stops with an error               the run ends with that error
all workers die                            the run ends
a server dies or hangs                     the run ends
somebody asks for an end                   workers stop after their steps

Whatever ends a run whose servers all live: they save what they have, if checkpoints have a place.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path

from partc.runtime.asynchronous.processes.job import ProcessPlace, SessionJob, SessionsEnd, write_session_job
from partc.runtime.asynchronous.processes.processes import Crew
from partc.runtime.asynchronous.processes.sockets import (
    LAUNCHER,
    PeerSockets,
    endpoints_of,
    limit_of_messages,
)
from partc.runtime.asynchronous.processes.watch import Rules, SessionsWatch
from partc.runtime.asynchronous.sessions.session import server_name, servers_of, worker_name
from partc.runtime.engines.allotted_nodes import on_allotted_nodes
from partc.runtime.engines.machines import Machines, write_environments
from partc.runtime.jobs.launcher import Log, OnProgress, StopRequest
from partc.runtime.plan.program import Plan
from partc.runtime.supervision.stop_signals import stop_signals
from partc.runtime.supervision.supervisor import Supervisor
from partc.runtime.transports.locked_sockets import LOCAL, socket_folder

_CONNECT_S = 5.0


def launch_sessions(
    plan: Plan,
    job_folder: Path,
    log: Path,
    machines: Machines,
    rules: Rules,
    on_progress: OnProgress | None,
    timeout_s: float | None,
    redirect: Path | None = None,
) -> SessionsEnd:
    """Run an asynchronous job to its end, or until a signal asks for one.

    A job in which no process gets on for `timeout_s` is ended. `redirect`: as `launch` takes it. Raises the
    error of who failed first, and Stopped where workers that were asked to stop did not do so well.
    """
    hosts = {server_name(rank.rank): rank.host for rank in servers_of(plan)}
    hosts |= {worker_name(number): place.host for number, place in enumerate(plan.asynchronous)}
    machines = on_allotted_nodes(machines, list(hosts.values()))
    addresses = machines.addresses
    with (
        stop_signals() as signals,
        socket_folder() as sockets,
        log.open("w", encoding="utf-8") as stream,
        ExitStack() as at_the_end,
    ):
        endpoints = endpoints_of(plan, addresses, str(sockets))
        places = {name: ProcessPlace(host, addresses.get(host, LOCAL)) for name, host in hosts.items()}
        session_job = SessionJob(
            endpoints, limit_of_messages(plan), rules.worker_steps, places, rules.staleness
        )
        write_session_job(job_folder, session_job)
        write_environments(job_folder, hosts, machines)
        supervisor = at_the_end.enter_context(
            Supervisor(hosts, addresses, job_folder, timeout_s, folders=(sockets,))
        )

        @cache
        def mesh() -> PeerSockets:
            """Connect when there is something to tell: a server that fails to start is to say so itself."""
            return at_the_end.enter_context(
                closing(PeerSockets(LAUNCHER, session_job, job_folder, _CONNECT_S))
            )

        crew = at_the_end.enter_context(_crew(plan, job_folder, machines, supervisor))
        stop = StopRequest(supervisor, signals)
        return SessionsWatch(
            plan, crew, supervisor, stop, mesh, Log(stream, redirect, hosts), rules, on_progress
        ).to_the_end()


@contextmanager
def _crew(plan: Plan, job_folder: Path, machines: Machines, supervisor: Supervisor) -> Iterator[Crew]:
    crew = Crew(plan, job_folder, machines)
    try:
        crew.start_all()
        yield crew
    finally:
        supervisor.end()
        crew.end(at_once=bool(supervisor.roster.unheard()))
