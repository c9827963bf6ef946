"""On which hosts nothing can be started any more: each is asked for a process that does nothing."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from partc.runtime.engines.allotted_nodes import on_allotted_nodes
from partc.runtime.engines.engine import Engine, find_engine, rank_environment, start_command
from partc.runtime.engines.machines import Machines
from partc.runtime.jobs.job_folder import held_folder
from partc.runtime.transports.locked_sockets import LOCAL

NOTHING = ("-c", "pass")
PATIENCE_S = 30.0
_AT_ONCE = 16


def lost_hosts(hosts: Sequence[str], machines: Machines, patience_s: float = PATIENCE_S) -> list[str]:
    """Return the hosts that start no process within `patience_s`, in their order. Raises BadUsage."""
    placed = on_allotted_nodes(machines, hosts)
    apart = [host for host in hosts if placed.of(host).address != LOCAL]
    if not apart:
        return []
    engine = find_engine()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        reached = list(pool.map(lambda host: _starts(engine, host, placed, patience_s), apart))
    return [host for host, is_reached in zip(apart, reached, strict=True) if not is_reached]


def _starts(engine: Engine, host: str, machines: Machines, patience_s: float) -> bool:
    with held_folder(Path(tempfile.gettempdir()), "partc-hosts-") as folder:
        command = start_command(engine, [host], machines, NOTHING, folder)
        process = subprocess.Popen(
            command.words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=rank_environment() | command.environment,
            start_new_session=True,
        )
        try:
            return process.wait(patience_s) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False
