"""Bytes that leave a host in a step: what the transport counts, against what the interface sends.

    sudo python benchmarks/interface_bytes.py

Hosts are network namespaces of one rank each, so that all that a rank exchanges crosses its interface. From
the interface's bytes 66 are taken for every packet: Ethernet 14, IPv4 20, TCP 20, its timestamps 12. The
transport's are values and row ids; sizes that travel before rows, MPI's own headers and what mpiexec says
are left out. Both are of some steps, less those of a shorter training: what begins and ends one cancels.
Differences above 2 % make the exit status 1.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from namespaces import Counted, Network, interface_counters, namespace_hosts
from rows import Row, write_rows

from partc.compiler.api import compile_step
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Adagrad
from partc.compiler.options import Options
from partc.cost.cluster.cluster import Cluster
from partc.models.catalogue import build_model
from partc.runtime.jobs.results import TrainingResult
from partc.runtime.jobs.runner import Runner

NETWORK = Network("pb", "10.213.8")
HEADER_BYTES = 14 + 20 + 20 + 12
ALLOWED = 0.02
FEW, MANY = 2, 12  # steps of the two trainings

DENSE = {"sizes": (512, 2048, 512), "batch": 16}
SPARSE = {
    "vocab": 40_000, "embedding": 256, "cells": 64, "projection": 256, "batch": 16,
    "steps": 16, "samples": 4_096,
}  # fmt: skip
STRATEGIES = {"mlp": ("allreduce", "ps"), "lm": ("allreduce", "ps", "hybrid")}


@dataclass(frozen=True)
class Sent:
    """Bytes that one host sends in a step."""

    values: float
    ids: float
    on_the_wire: float  # headers taken off
    headers: float

    @property
    def difference(self) -> float:
        """Return by how much the wire carries more than the transport counts."""
        return self.on_the_wire / (self.values + self.ids) - 1


def main() -> int:
    """Measure every case, print the table, and tell whether all agree."""
    options = _options()
    print("work strategy   hosts | host   values      ids     sum | interface  headers | difference")
    rows: list[Row] = []
    for hosts in options.hosts:
        with (
            tempfile.TemporaryDirectory() as name,
            namespace_hosts(hosts, 1, options.mbit * 1e6, NETWORK) as cluster,
        ):
            for work, strategies in STRATEGIES.items():
                train = _training_step(work)
                for strategy in strategies:
                    found = _measure(train, cluster, strategy, Path(name) / f"{work}-{strategy}")
                    rows += _report(work, strategy, found)
    write_rows(rows, options.json)
    worst = max(abs(row.ratio - 1) for row in rows)
    print(f"worst difference {worst:.2%}, allowed {ALLOWED:.0%}")
    return int(worst > ALLOWED)


def _training_step(work: str) -> onnx.ModelProto:
    if work == "mlp":
        forward = build_model("mlp", **DENSE)
        return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))
    return build_training_graph(build_model("lm", **SPARSE), loss="loss", optimizer=Adagrad(0.1))


def _measure(train: onnx.ModelProto, cluster: Cluster, strategy: str, folder: Path) -> list[Sent]:
    """Return what each host sends in a step."""
    compile_step(train, cluster, folder, Options(strategy=strategy))
    hosts = len(cluster.hosts)
    few, many = (dict(_train(folder, steps, hosts)) for steps in (FEW, MANY))
    steps = MANY - FEW
    return [
        Sent(*((many[host][part] - few[host][part]) / steps for part in range(4))) for host in range(hosts)
    ]


def _train(folder: Path, steps: int, hosts: int) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """Train, and yield each host's bytes: values and ids sent, those of its interface, headers."""
    before = interface_counters(hosts, NETWORK)
    result: TrainingResult = Runner(folder).train("synthetic", steps, save=False)
    after = interface_counters(hosts, NETWORK)
    for host in range(hosts):
        exchanged = result.exchanged[host]
        wire, headers = _wire_bytes(before[host], after[host])
        yield host, (exchanged.values_sent, exchanged.ids_sent, wire, headers)


def _wire_bytes(before: Counted, after: Counted) -> tuple[int, int]:
    """Return what was sent without headers, and the headers."""
    headers = HEADER_BYTES * (after.sent_packets - before.sent_packets)
    return after.sent_bytes - before.sent_bytes - headers, headers


def _report(work: str, strategy: str, found: list[Sent]) -> list[Row]:
    rows: list[Row] = []
    for host, sent in enumerate(found, 1):
        counted = sent.values + sent.ids
        print(
            f"{work:4s} {strategy:10s} {len(found):5d} | {host:4d} {sent.values:9.0f} {sent.ids:8.0f} "
            f"{counted:9.0f} | {sent.on_the_wire:9.0f} {sent.headers:8.0f} | {sent.difference:+.2%}"
        )
        system = f"{strategy}, host {host} of {len(found)}"
        rows.append(Row(work, system, sent.on_the_wire, "bytes/step", 1 + sent.difference))
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, default=1000, help="of each host's link, in both directions")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
