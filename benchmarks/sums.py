"""What sums among workers of several hosts take, flat and level by level, against what they are priced.

    sudo python benchmarks/sums.py [--hosts 2] [--workers 2] [--mbit 1000] [--kbytes 64 1024] [--json FILE]

Hosts are namespaces. All workers sum, or scatter a sum, or gather a value or rows, through the transport that
plans run on, in rounds through all ways in turn; a way counts the median of what its slowest rank took.
`link`: bytes that the busiest host sends, by those of the value, measured at its interface and as priced.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from namespaces import Network as Names
from namespaces import namespace_hosts
from rows import write_rows

from partc.cost.cluster.cluster import Cluster, groups_of, ranks_of
from partc.cost.network import collectives
from partc.cost.network.topology import Network
from partc.cost.network.traffic import Phases, host_traffic, seconds_of
from partc.cost.network.two_level import network_groups_of
from partc.runtime.engines.engine import find_mpiexec, rank_environment
from partc.runtime.plan.program import Kind, Start
from partc.runtime.transports.communication import Dense, Part
from partc.runtime.transports.sum_levels import by_host

WARM_UP = 2
NAMES = Names("psum", "10.213.9")
WAYS: dict[str, Kind] = {
    "flat": "all_reduce",
    "levels": "all_reduce",
    "scatter": "reduce_scatter",
    "gather": "all_gather",
    "rows": "all_gather_rows",
}
ROW_BYTES = 256


def main() -> None:
    """Measure all ways and sizes, and print them beside their prices."""
    options = _options()
    if options.rank_of:
        return _be_rank(options.rank_of, options.rounds)
    with (
        tempfile.TemporaryDirectory() as name,
        namespace_hosts(options.hosts, options.workers, options.mbit * 1e6, NAMES) as cluster,
    ):
        folder, sizes = Path(name), [1000 * kbytes for kbytes in options.kbytes]
        asked = {"groups": groups_of(cluster), "sizes": sizes, "interface": NAMES.bridge}
        asked["hosts"] = [rank.host for rank in ranks_of(cluster)]
        (folder / "asked.json").write_text(json.dumps(asked))
        _run_ranks(cluster, folder, options)
        told = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    rows = [_row(cluster, told, way, nbytes) for nbytes in sizes for way in WAYS]
    for row in rows:
        told_of = "{way:8} {kbytes:6.0f} kB {ms:8.2f} ms, priced {priced_ms:8.2f}"
        print(f"{told_of}; link {{link:5.2f}}, {{priced_link:5.2f}}".format(**row))
    write_rows(rows, options.json)


def _row(cluster: Cluster, told: list[Any], way: str, nbytes: int) -> dict[str, Any]:
    of_ranks = [rank[f"{way} {nbytes}"] for rank in told]
    slowest = [max(taken) for taken in zip(*(rank["seconds"] for rank in of_ranks), strict=True)]
    phases = _price(cluster, way, nbytes)
    network = Network(cluster)
    return {
        "way": way,
        "kbytes": nbytes / 1000,
        "ms": 1e3 * statistics.median(slowest),
        "priced_ms": 1e3 * seconds_of(network, phases),
        "link": max(statistics.median(rank["sent"]) for rank in of_ranks) / nbytes,
        "priced_link": max(sent for _, sent in host_traffic(network, phases).values()) / nbytes,
    }


def _price(cluster: Cluster, way: str, nbytes: int) -> Phases:
    groups = network_groups_of(cluster)
    regions = [nbytes / len(groups.workers)] * len(groups.workers)
    match way:
        case "flat":
            return collectives.all_reduce(groups.network, groups.workers, nbytes)
        case "levels":
            return collectives.all_reduce_by_levels(groups.network, groups.workers, nbytes)
        case "scatter":
            return collectives.reduce_scatter(groups.network, groups.workers, regions)
        case "gather":
            return collectives.all_gather(groups.network, groups.workers, regions)
        case _:
            return collectives.all_gather_rows(groups.network, groups.workers, regions)


def _run_ranks(cluster: Cluster, folder: Path, options: argparse.Namespace) -> None:
    addresses = ",".join(f"{host.address}:{len(host.devices)}" for host in cluster.hosts)
    rank = [sys.executable, str(Path(__file__).absolute()), "--rank-of", str(folder)]
    hosts = ["-host", addresses, "-n", str(len(ranks_of(cluster)))]
    command = [find_mpiexec(), *hosts, *rank, "--rounds", str(options.rounds)]
    subprocess.run(command, check=True, env=rank_environment())


def _be_rank(folder: Path, rounds: int) -> None:
    """Be one rank: go through all ways in turn, and write what each took and what the host sent."""
    from mpi4py import MPI  # which is to be loaded by ranks alone

    from partc.runtime.transports.mpi import MPITransport

    world, asked = MPI.COMM_WORLD, json.loads((folder / "asked.json").read_text())
    groups = {name: tuple(map(tuple, members)) for name, members in asked["groups"].items()}
    ranks = [SimpleNamespace(rank=number, host=host) for number, host in enumerate(asked["hosts"])]
    starts = [
        Start(0, kind, "workers", "worker", "worker", (), (), by_levels=way == "levels")
        for way, kind in WAYS.items()
    ]
    plan: Any = SimpleNamespace(groups=groups, ranks=ranks, instructions=starts)
    hosts = by_host(groups["workers"][0], dict(enumerate(asked["hosts"])))
    transport = MPITransport(plan, world)
    told: dict[str, dict[str, list[float]]] = {}
    for number in range(WARM_UP + rounds):
        for nbytes in asked["sizes"]:
            for way in WAYS:
                value = np.ones(nbytes // 4, np.float32)
                _meet(world)
                sent, begun_s = _sent_bytes(asked["interface"]), time.perf_counter()
                part = _part(WAYS[way], groups["workers"][0], world.rank, value)
                part = replace(part, hosts=hosts if way == "levels" else ())
                _await(transport.start(part).done)
                passed_s = time.perf_counter() - begun_s
                _meet(world)
                if number >= WARM_UP:
                    found = told.setdefault(f"{way} {nbytes}", {"seconds": [], "sent": []})
                    found["seconds"].append(passed_s)
                    found["sent"].append(_sent_bytes(asked["interface"]) - sent)
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(told))


def _part(kind: Kind, members: tuple[int, ...], rank: int, value: np.ndarray) -> Part:
    position = members.index(rank)
    ends = [value.size * i // len(members) for i in range(len(members) + 1)]
    counts = tuple(b - a for a, b in pairwise(ends))
    own = value[ends[position] : ends[position + 1]]
    start = Start(0, kind, "", "worker", "worker", ("value",), ("value",), counts=counts)
    if kind == "all_gather_rows":
        rows = np.ones((max(1, value.nbytes // len(members) // ROW_BYTES), ROW_BYTES // 4), np.float32)
        return Part(start, members, position, True, True, rows=(rows,))
    source, target = (own if way == kind else value for way in ("all_gather", "reduce_scatter"))
    return Part(start, members, position, True, True, dense=(Dense(source, target),))


def _await(done: Callable[[], bool]) -> None:
    wait_s = 20e-6
    while not done():
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 5e-4)


def _meet(world: Any) -> None:
    """Wait for all ranks asleep: MPI's own waiting takes a core."""
    arrived = world.Ibarrier()
    while not arrived.Test():
        time.sleep(1e-3)


def _sent_bytes(interface: str) -> int:
    """Return what the host's interface has sent so far."""
    (line,) = re.findall(rf"{interface}:(.*)", Path("/proc/net/dev").read_text())
    return int(line.split()[8])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="of a host")
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--kbytes", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
