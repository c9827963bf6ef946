"""How much of a step's communication is hidden, and which share of the line's rate its sums reach.

    sudo python benchmarks/overlap.py [--work resnet50] [--hosts 4] [--mbit 1000] [--rounds 6] [--json FILE]

A rank on each host (namespaces), a batch per replica. In turns all ranks take a step without communications,
a step's communications without computing, and a whole step; medians of the slowest rank.

    hidden     (computing + communicating - step) / communicating
    line rate  bytes that a ring's AllReduce sends, 2 (n - 1) / n of a sum's, by the seconds of communicating
    cores      seconds that this machine's cores are at work meanwhile, the network's share too: hosts of one
               machine cannot hide more of it than cores are idle while they compute

Needs partc with its `peers` extra.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from data_parallel import compile_for
from namespaces import namespace_hosts
from overheads import Silence
from partc_steps import write_training_step
from sizes import WORKS, batch_of_replica

from partc.cost.cluster.cluster import Cluster
from partc.runtime.data.initial import InitialValues
from partc.runtime.engines.engine import find_mpiexec, rank_environment
from partc.runtime.engines.kept_memory import keep_freed_memory
from partc.runtime.execution.device import Sessions, device_of
from partc.runtime.execution.environment import Environment
from partc.runtime.execution.executor import Executor
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Plan, Start, Wait
from partc.runtime.transports.patience import Patience

WARM_UP = 2
SYSTEMS = ("computing", "communicating", "step")


def main() -> None:
    """Measure a work, and print what is hidden."""
    options = _options()
    if options.rank_of:
        return _be_rank(options.rank_of, options.work, options.rounds)
    with _folder_and_cluster(options) as (folder, cluster):
        compile_for(options.work, write_training_step(options.work, folder), cluster, folder / "plan")
        _run_ranks(cluster, folder, options.work, options.rounds)
        told = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    slowest = {
        system: statistics.median(max(taken) for taken in zip(*(rank[system] for rank in told), strict=True))
        for system in SYSTEMS
    }
    busy_s = {system: statistics.median(told[0]["busy"][system]) for system in SYSTEMS}
    computing_s, communicating_s, step_s = (slowest[system] for system in SYSTEMS)
    hidden = (computing_s + communicating_s - step_s) / communicating_s
    sent_bytes = 2 * (options.hosts - 1) / options.hosts * told[0]["bytes"]
    of_line = 8 * sent_bytes / communicating_s / (options.mbit * 1e6)
    print(
        f"{options.work}, {options.hosts} hosts at {options.mbit:g} Mbit/s: "
        f"computing {computing_s:.3f} s, communicating {communicating_s:.3f} s, step {step_s:.3f} s: "
        f"{hidden:.0%} hidden, {of_line:.0%} of the line's rate",
        flush=True,
    )
    print("cores at work:", ", ".join(f"{system} {busy_s[system]:.2f} s" for system in SYSTEMS), flush=True)
    if options.json:
        row = {"work": options.work, "hosts": options.hosts, **slowest, "hidden": hidden, "of_line": of_line}
        row["busy"] = busy_s
        options.json.write_text(json.dumps(row, indent=1) + "\n")


@contextmanager
def _folder_and_cluster(options: argparse.Namespace) -> Iterator[tuple[Path, Cluster]]:
    with (
        tempfile.TemporaryDirectory() as made,
        namespace_hosts(options.hosts, 1, options.mbit * 1e6) as cluster,
    ):
        yield Path(made), cluster


def _run_ranks(cluster: Cluster, folder: Path, work: str, rounds: int) -> None:
    addresses = ",".join(f"{host.address}:1" for host in cluster.hosts)
    rank = [sys.executable, str(Path(__file__).absolute()), "--rank-of", str(folder), "--work", work]
    hosts = ["-host", addresses, "-n", str(len(cluster.hosts))]
    command = [find_mpiexec(), *hosts, *rank, "--rounds", str(rounds)]
    subprocess.run(command, check=True, env=rank_environment())


def _be_rank(folder: Path, work: str, rounds: int) -> None:
    """Be one rank: take the three kinds of steps in turns, and write how long each took."""
    keep_freed_memory()  # as daemons do

    from mpi4py import MPI  # which is to be loaded by ranks alone

    from partc.runtime.transports.mpi import MPITransport

    world, plan_folder = MPI.COMM_WORLD, read_plan_folder(folder / "plan", is_checked=True)
    plan, rank = plan_folder.plan, plan_folder.plan.ranks[world.rank]
    environment = Environment(plan, rank, device_of(rank), InitialValues(plan_folder, None))
    sessions, network = Sessions(plan_folder), MPITransport(plan, world)
    sums, nbytes = _sums_alone(plan, environment)
    executors = {
        "computing": Executor(plan, rank, environment, sessions, Silence()),
        "communicating": Executor(sums, rank, environment, sessions, network),
        "step": Executor(plan, rank, environment, sessions, network),
    }
    patience = Patience(0.0, 600.0)
    took_s: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    busy_s: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for number in range(WARM_UP + rounds):
        batch = batch_of_replica(work, number, world.rank)
        for system, executor in executors.items():
            _meet(world)
            begun_s, busy_before_s = time.perf_counter(), _busy_s()
            patience.through(executor.step(batch), world.rank)
            passed_s = time.perf_counter() - begun_s
            _meet(world)
            if number >= WARM_UP:
                took_s[system].append(passed_s)
                busy_s[system].append(_busy_s() - busy_before_s)
    (folder / f"rank-{world.rank}.json").write_text(json.dumps({**took_s, "busy": busy_s, "bytes": nbytes}))


def _meet(world: Any) -> None:
    """Wait for all ranks asleep: MPI's own waiting takes a core."""
    arrived = world.Ibarrier()
    while not arrived.Test():
        time.sleep(1e-3)


def _busy_s() -> float:
    """Return the seconds that the machine's cores have worked: user, nice, system, irq and softirq."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _sums_alone(plan: Plan, environment: Environment) -> tuple[Plan, int]:
    """Return a plan of the sums in buffers and nothing else, and their bytes."""
    nbytes: dict[int, int] = {}
    for each in plan.instructions:
        if isinstance(each, Start) and each.kind == "all_reduce":
            buffers = [environment.memory(read) for read in each.reads]
            if all(buffer is not None for buffer in buffers):
                nbytes[each.tag_id] = sum(buffer.nbytes for buffer in buffers if buffer is not None)
    kept = tuple(i for i in plan.instructions if isinstance(i, Start | Wait) and i.tag_id in nbytes)
    return msgspec.structs.replace(plan, instructions=kept), sum(nbytes.values())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", choices=WORKS, default="resnet50")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
