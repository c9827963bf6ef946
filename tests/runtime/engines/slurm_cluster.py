"""A cluster of Slurm's own daemons on this machine: slurmctld, and a slurmd in a namespace for each node.

    here   munged, slurmctld, salloc, sbatch ──┐
    n1     slurmd                    ── veth ──┼── bridge
    n2     slurmd                    ── veth ──┘

Nodes have names and addresses of their own, and share files. Needs root, iproute2, and Slurm with munge.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.namespaces import Network, namespace_hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sbatch", "scancel", "sinfo")
NETWORK = Network("psl", "10.213.29")
BITS_PER_S = 1e9
_CONTROL_PORT, _NODE_PORT = 16817, 16818
_READY_S = 30.0
_CONFIGURATION = """ClusterName=partc
SlurmctldHost={here}({address})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/socket
SlurmctldPort={control}
SlurmdPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SwitchType=switch/none
MpiDefault=none
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing_for_slurm() -> str:
    """Return why there can be no cluster of Slurm's here, or nothing."""
    if os.geteuid() != 0:
        return "Slurm's daemons with nodes as network namespaces need root"
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"Slurm is not installed: {', '.join(lacking)}" if lacking else ""


class SlurmCluster:
    """Where commands see Slurm, and its nodes by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._prefix = _seeing(folder / "hosts")

    def run(self, *words: str, timeout_s: float = 120.0) -> "subprocess.CompletedProcess[str]":
        """Run a command on this machine, the login node."""
        return subprocess.run(
            [*self._prefix, *words],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=_environment(self.folder),
            cwd=self.folder,
        )


@contextmanager
def slurm_cluster(nodes: int, cores: int = 4) -> Iterator[SlurmCluster]:
    """Start Slurm with nodes n1, n2, ..; end it, by what was started here."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        folder.chmod(0o755)  # munge refuses sockets that not all may reach
        stack.enter_context(namespace_hosts(nodes, 1, BITS_PER_S, NETWORK))
        _write_configuration(folder, nodes, cores)
        stack.enter_context(_daemon(folder, "munged", *_munged(folder)))
        here = _seeing(folder / "hosts")
        stack.enter_context(_daemon(folder, "slurmctld", *here, "slurmctld", "-D", "-i"))
        for number in range(1, nodes + 1):
            stack.enter_context(_daemon(folder, f"slurmd-n{number}", *_slurmd(folder, number)))
        cluster = SlurmCluster(folder)
        _wait_for_nodes(cluster, nodes)
        yield cluster


def _write_configuration(folder: Path, nodes: int, cores: int) -> None:
    own = [f"{kind}-n{number}" for kind in ("spool", "tmp") for number in range(1, nodes + 1)]
    for name in ("munge", "state", *own):
        (folder / name).mkdir()
    names = {f"n{number}": NETWORK.address(number) for number in range(1, nodes + 1)}
    here = socket.gethostname()
    lines = (f"NodeName={name} NodeAddr={address} CPUs={cores}" for name, address in names.items())
    text = _CONFIGURATION.format(
        here=here,
        address=NETWORK.address(254),
        folder=folder,
        control=_CONTROL_PORT,
        port=_NODE_PORT,
        nodes="\n".join(lines),
    )
    (folder / "slurm.conf").write_text(text)
    known = {"localhost": "127.0.0.1", here: NETWORK.address(254), **names}
    (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in known.items()))
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    (folder / "munge" / "key").chmod(0o600)


def _munged(folder: Path) -> list[str]:
    munge = folder / "munge"
    named = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    return [
        "munged",
        "--foreground",
        "--force",
        *(f"--{name}={munge / file}" for name, file in named.items()),
    ]


def _environment(folder: Path) -> dict[str, str]:
    """Return an environment that names Slurm's configuration, and no engine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PARTC_", "SLURM_"))}
    return kept | {"SLURM_CONF": str(folder / "slurm.conf")}


def _seeing(hosts: Path) -> list[str]:
    """Return what a command begins with whose names of hosts are those of a file."""
    return ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]


def _slurmd(folder: Path, number: int) -> list[str]:
    named = ["unshare", "--uts", "sh", "-c", f'hostname n{number} && exec "$@"', "sh"]
    # `ip netns exec` would mount a /sys without control groups, which slurmd looks for.
    inside = ["nsenter", f"--net=/run/netns/{NETWORK.host(number)}", *_seeing(folder / "hosts"), *named]
    return [*inside, "slurmd", "-D", "-N", f"n{number}"]


@contextmanager
def _daemon(folder: Path, name: str, *words: str) -> Iterator[None]:
    """Run a daemon, which no command stands between and its process."""
    with (folder / f"{name}.out").open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=_environment(folder))
    try:
        if name == "munged":
            _wait_for(folder / "munge" / "socket")
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(path: Path) -> None:
    ends_s = time.monotonic() + _READY_S
    while not path.exists():
        if time.monotonic() > ends_s:
            raise TimeoutError(f"{path} is not there after {_READY_S:g} s")
        time.sleep(0.05)


def _wait_for_nodes(cluster: SlurmCluster, nodes: int) -> None:
    ends_s = time.monotonic() + _READY_S
    while cluster.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() != str(nodes):
        if time.monotonic() > ends_s:
            logs = (path.read_text(errors="replace")[-2000:] for path in cluster.folder.glob("*.log"))
            raise TimeoutError("Slurm's nodes are not idle:\n" + "\n".join(logs))
        time.sleep(0.2)
