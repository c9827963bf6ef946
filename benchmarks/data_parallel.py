"""Time data-parallel steps of partc and of PyTorch's DistributedDataParallel (Gloo), a batch per replica.

    python benchmarks/data_parallel.py [--works lm gpt2 resnet50] [--rounds 3] [--steps 8] [--json FILE]
    sudo python benchmarks/data_parallel.py --hosts 4 [--mbit 1000]
    sudo python benchmarks/data_parallel.py --hosts 2 --works lm --strategy tensor=2
    sudo python benchmarks/data_parallel.py --hosts 2 --works lm --strategy auto --measured

Without --hosts two ranks of this machine; with it a rank on each of so many hosts (namespaces). Both begin
with the same weights and are fed the same batches: before anything is timed, five steps of both must have
equal losses. Then they take turns, a run of each in every round. With --strategy partc trains the replicas'
batches as one, by any strategy (also `search`), where the mean of their losses is the loss of all; with
--measured it chooses by what `partc cluster measure` finds. Needs partc with its `peers` extra.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from namespaces import Network, namespace_hosts
from partc_steps import write_training_step
from rows import write_rows
from sizes import WORKS, batch_of_replica
from torch_steps import weights_for_partc

from partc.compiler.api import compile_step
from partc.compiler.commands.cluster import measure_cluster
from partc.compiler.compilation import Compilation
from partc.compiler.options import GraphOptions, Options
from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster, ranks_of
from partc.cost.cluster.machines import Device, Host
from partc.runtime.jobs.metrics import StepMetrics, read_metrics
from partc.runtime.jobs.runner import Runner

EQUAL_STEPS = 5
MOST_APART = 2e-3  # of a loss: float32, sums in another order, five steps of an optimizer
WARM_UP = 2
REPLICA = Path(__file__).with_name("torch_replica.py")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True)
class Row:
    work: str
    hosts: int  # 0: two ranks of one machine
    system: str
    value: float
    unit: str
    ratio: float | None  # PyTorch's step over partc's


def main() -> None:
    """Compare every work, and print a line of each."""
    options = _options()
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = two_ranks()
        if options.hosts:
            cluster = stack.enter_context(namespace_hosts(options.hosts, 1, options.mbit * 1e6))
        if options.measured:
            cluster = measure_cluster(cluster, folder).cluster
        ranks = options.hosts or 2
        for work in options.works:
            plan = _compile(work, cluster, folder / work, options.strategy)
            _assert_equal_losses(work, plan, ranks, options.hosts)
            took_s: dict[str, list[float]] = {"partc": [], "pytorch": []}
            for _ in range(options.rounds):
                steps = options.steps + WARM_UP
                took_s["partc"] += [line.s for line in train_partc(work, plan, ranks, steps)][WARM_UP:]
                took_s["pytorch"] += [line.s for line in _train_torch(work, ranks, options.hosts, steps)][
                    WARM_UP:
                ]
            rows += _rows(work, options.hosts, {name: statistics.median(s) for name, s in took_s.items()})
    write_rows(rows, options.json)


def _rows(work: str, hosts: int, step_s: Mapping[str, float]) -> list[Row]:
    ratio = step_s["pytorch"] / step_s["partc"]
    where = f"{hosts} hosts" if hosts else "2 local ranks"
    times = "   ".join(f"{system} {took_s:7.3f} s" for system, took_s in step_s.items())
    print(f"{work:9} {where:14} {times}   {ratio:.2f}x", flush=True)
    return [
        Row(work, hosts, "pytorch", step_s["pytorch"], "s/step", None),
        Row(work, hosts, "partc", step_s["partc"], "s/step", ratio),
    ]


def two_ranks() -> Cluster:
    """Return a cluster of two cores of this machine."""
    devices = tuple(Device(f"cpu{number}", "cpu", "cpu-core", memory_bytes=2**34) for number in range(2))
    return Cluster(CLUSTER_FORMAT, "two ranks", (Host("localhost", devices, memory_bytes=2**35),))


def _compile(work: str, cluster: Cluster, folder: Path, strategy: str | None) -> Path:
    folder.mkdir()
    replicas = 1 if strategy is None else len(ranks_of(cluster))
    train = write_training_step(work, folder, replicas)
    compiled = compile_for(work, train, cluster, folder / "plan", strategy)
    compared = ", ".join(f"{tried.names[0]} {tried.step_s:.3f} s" for tried in compiled.compared)
    if compared:
        print(f"{work}: predicted a step, the first is taken: {compared}", flush=True)
    return folder / "plan"


def compile_for(
    work: str, train: Path, cluster: Cluster, out: Path, strategy: str | None = None
) -> Compilation:
    """Write the plan of a work's training graph: of a batch for each replica, or of all by a strategy."""
    graph = GraphOptions(sample_axes={"sampled": None} if work == "lm" else None)
    if strategy is None:
        return compile_step(train, cluster, out, Options(batch="per-replica", options=graph))
    return compile_step(train, cluster, out, Options(batch="global", strategy=strategy, options=graph))


def _batches(work: str, ranks: int, steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield total batches; PyTorch's ranks draw the same parts themselves."""
    for step in range(steps):
        parts = [batch_of_replica(work, step, replica) for replica in range(ranks)]
        yield {
            name: parts[0][name] if name == "sampled" else np.concatenate([part[name] for part in parts])
            for name in parts[0]
        }


def train_partc(work: str, plan: Path, ranks: int, steps: int) -> list[StepMetrics]:
    """Train a plan, and return what its metrics say of every step."""
    metrics = plan / "metrics.jsonl"
    Runner(plan).train(
        _batches(work, ranks, steps),
        steps,
        initial=weights_for_partc(work) or None,
        outputs="none",
        save=False,
        metrics=metrics,
    )
    return read_metrics(metrics)


def _train_torch(work: str, ranks: int, hosts: int, steps: int) -> list[StepMetrics]:
    network = Network()
    address = network.address(1) if hosts else "127.0.0.1"
    port = _free_port()

    def enter(rank: int) -> list[str]:
        return ["ip", "netns", "exec", network.host(rank + 1)] if hosts else []

    processes = [
        subprocess.Popen(
            [*enter(rank), sys.executable, str(REPLICA), work, str(steps)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | ONE_THREAD
            | {"MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
            | ({"GLOO_SOCKET_IFNAME": network.bridge} if hosts else {}),
        )
        for rank in range(ranks)
    ]
    told = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"PyTorch's ranks ended with {[process.returncode for process in processes]}")
    lines = [json.loads(line) for line in told[0].splitlines()]
    return [StepMetrics(number, line["loss"], line["s"]) for number, line in enumerate(lines, 1)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _assert_equal_losses(work: str, plan: Path, ranks: int, hosts: int) -> None:
    batches, initial = _batches(work, ranks, EQUAL_STEPS), weights_for_partc(work) or None
    result = Runner(plan).train(batches, EQUAL_STEPS, initial=initial, save=False)
    ours = [float(np.mean(outputs["loss"])) for outputs in result.outputs]
    theirs = [line.loss for line in _train_torch(work, ranks, hosts, EQUAL_STEPS)]
    np.testing.assert_allclose(ours, theirs, rtol=MOST_APART, err_msg=f"losses of {work}")
    print(
        f"{work}: losses of {EQUAL_STEPS} steps {[round(loss, 4) for loss in ours]}, as PyTorch's", flush=True
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["lm", "gpt2", "resnet50"])
    parser.add_argument("--hosts", type=int, default=0)
    parser.add_argument("--mbit", type=float, default=1000)
    parser.add_argument("--strategy")
    parser.add_argument("--measured", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
