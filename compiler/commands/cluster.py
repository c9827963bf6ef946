"""`partc cluster`: clusters described (init_cluster.py), and links, cores and rates measured as they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, zip_longest
from pathlib import Path
from typing import Annotated

import onnx
import typer
from rich.table import Table

from partc.compiler.commands.command_line.declare import declare
from partc.compiler.commands.command_line.panels import GroupedGroup
from partc.compiler.commands.console import answer, show, tell, working_on
from partc.compiler.commands.init_cluster import EPILOG as INIT_EPILOG
from partc.compiler.commands.init_cluster import init_command
from partc.compiler.commands.results.machines import CheckedCollective, ClusterMeasured, MeasuredPair
from partc.compiler.output.output_paths import check_output_file
from partc.compiler.report.units import percent, seconds, size
from partc.cost.cluster.cluster import Cluster, encode_cluster, read_any_cluster
from partc.cost.cluster.fit_rates import fit_cores, fit_flops
from partc.cost.cluster.machines import Device, Host
from partc.cost.network import collectives
from partc.cost.network.fit_links import Line, fit_cluster, fit_line
from partc.cost.network.topology import Network
from partc.cost.network.traffic import seconds_of
from partc.runtime.engines.machines import Machine, Machines
from partc.runtime.errors import BadUsage
from partc.runtime.jobs.measure import Probe, Timing, measure
from partc.runtime.whole_file import write_whole

MESSAGE_BYTES = (8, 1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 23)
TOGETHER_BYTES = (1 << 16, 1 << 22)
SIDE = 256  # of the matrices that are multiplied: a fraction of a millisecond
PRODUCT_FLOPS = 2 * SIDE**3
REPEATS = 20
MOST_ERROR = 1.0  # of a message: more is others' work, on these hosts or on their network
MOST_RATIO = 2.0  # of a prediction to what was measured, or the reverse
MAX_HOSTS = 8  # beyond, only neighbours in the file's order are paired

EPILOG = "Example: partc cluster measure cluster.json -o measured.json"

cluster_command = typer.Typer(
    cls=GroupedGroup, no_args_is_help=True, help="Describe a cluster, and look at it as it is.", epilog=EPILOG
)
declare(cluster_command, "init", epilog=INIT_EPILOG)(init_command)


@dataclass(frozen=True)
class MeasuredCluster:
    """The lines of all pairs, the cluster that they make, and how it prices what was measured besides."""

    cluster: Cluster
    lines: dict[tuple[str, str], Line]
    checks: tuple[tuple[Timing, float], ...]  # (sample, predicted seconds)

    def record(self, output: str) -> ClusterMeasured:
        """Return the document of --json."""
        pairs = (MeasuredPair(pair, k.latency_s, k.bytes_per_s, k.error) for pair, k in self.lines.items())
        together = (CheckedCollective(s.kind, s.nbytes, s.seconds, p) for s, p in self.checks)
        return ClusterMeasured(output, tuple(pairs), tuple(together), self.warnings())

    def warnings(self) -> tuple[str, ...]:
        """Return what the cluster, as it is written, does not explain of what was measured."""
        messages = (
            f"messages between {_between(*pair)} are up to {percent(line.error)} off what is written of them"
            for pair, line in self.lines.items()
            if line.error > MOST_ERROR
        )
        together = (
            f"{sample.kind} of {size(sample.nbytes)} took {seconds(sample.seconds)}, predicted "
            f"{seconds(predicted_s)}"
            for sample, predicted_s in self.checks
            if not 1 / MOST_RATIO <= predicted_s / sample.seconds <= MOST_RATIO
        )
        return tuple(
            f"{what}: measure again with nothing else running on these hosts, and a core for each worker"
            for what in (*messages, *together)
        )

    def pairs(self) -> Table:
        """Return what messages take."""
        table = Table("between", "latency", "rate", "largest error", title="messages")
        for (first, second), line in self.lines.items():
            rate = f"{size(line.bytes_per_s)}/s"
            table.add_row(_between(first, second), seconds(line.latency_s), rate, percent(line.error))
        return table

    def together(self) -> Table:
        """Return what all ranks together take, measured and predicted."""
        table = Table("all ranks", "bytes", "measured", "predicted", "ratio", title="check")
        for sample, predicted_s in self.checks:
            ratio = f"{predicted_s / sample.seconds:.2f}x"
            table.add_row(
                sample.kind, size(sample.nbytes), seconds(sample.seconds), seconds(predicted_s), ratio
            )
        return table


@declare(cluster_command, "measure", epilog=EPILOG)
def measure_command(
    cluster: Annotated[Path, typer.Argument(help="cluster.json, or a resource file.", metavar="CLUSTER")],
    out: Annotated[Path, typer.Option("-o", "--output", help="The cluster file to write.")],
) -> None:
    """Time messages between the hosts, and write the cluster with the rates that they have."""
    check_output_file(out, (cluster,))
    out.resolve().parent.mkdir(parents=True, exist_ok=True)
    with working_on("measuring"):
        measurements = measure_cluster(read_any_cluster(cluster), out.resolve().parent)
    write_whole(out, encode_cluster(measurements.cluster))
    show(measurements.pairs())
    show(measurements.together())
    tell(f"{len(measurements.lines)} pairs measured -> {out}; links to single devices keep the file's values")
    for line in measurements.warnings():
        tell(f"warning: {line}")
    answer(measurements.record(str(out)))


def _between(first: str, second: str) -> str:
    return f"processes of {first}" if first == second else f"{first} and {second}"


def measure_cluster(cluster: Cluster, shared_folder: Path) -> MeasuredCluster:
    """Measure with a process for each CPU share, or two a host. `shared_folder`: a folder that all hosts see.

    Raises BadUsage, RankFailed.
    """
    measured = [(host, device) for host in cluster.hosts for device in _measured_devices(host)]
    hosts, ends = [host.name for host, _ in measured], [device.name for _, device in measured]
    addresses = {host.name: host.address for host in cluster.hosts}
    if len(hosts) < 2:
        raise BadUsage(
            "one process has nobody to send to", at="hosts", fix="measure a cluster of at least two devices"
        )
    rounds = _rounds(hosts, addresses)
    threads = tuple(device.threads if _is_shared_out(host) else 0 for host, device in measured)
    probe = Probe(threads, _product(), rounds, MESSAGE_BYTES, TOGETHER_BYTES, REPEATS)
    machines = tuple(Machine(h.name, h.address, h.environment, h.python) for h in cluster.hosts)
    samples = measure(probe, hosts, Machines(machines, cluster.mpiexec), shared_folder)
    lines = {
        (hosts[first], hosts[second]): fit_line(
            [(s.nbytes, s.seconds) for s in samples if s.kind == "message" and s.ends == (first, second)]
        )
        for pairs in rounds
        for first, second in pairs
    }
    products = _products(samples, hosts, threads)
    fitted = fit_flops(fit_cores(fit_cluster(cluster, lines), products), products, PRODUCT_FLOPS)
    together = [sample for sample in samples if sample.kind in ("all_reduce", "all_gather")]
    return MeasuredCluster(
        fitted, lines, tuple((s, _predicted_s(s, Network(fitted), ends)) for s in together)
    )


def _product() -> bytes:
    square = f"float[{SIDE}, {SIDE}]"
    graph = f"product ({square} a, {square} b) => ({square} c) {{ c = MatMul(a, b) }}"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> {graph}')
    return bytes(model.SerializeToString())


def _measured_devices(host: Host) -> tuple[Device, ...]:
    """Return the devices that get a process: of CPU shares all, for they share cores."""
    return host.devices if _is_shared_out(host) else host.devices[:2]


def _is_shared_out(host: Host) -> bool:
    return all(device.kind == "cpu" for device in host.devices)


def _products(
    samples: Sequence[Timing], hosts: Sequence[str], threads: Sequence[int]
) -> dict[str, list[tuple[int, float, float]]]:
    """Return by host what each of its ranks computes with, and takes for a product alone and crowded."""
    took_s = {(sample.kind, sample.ends[0]): sample.seconds for sample in samples}
    products: dict[str, list[tuple[int, float, float]]] = {}
    for rank, (host, count) in enumerate(zip(hosts, threads, strict=True)):
        if count:
            times_s = took_s["alone", rank], took_s["crowded", rank]
            products.setdefault(host, []).append((count, *times_s))
    return products


def _rounds(hosts: Sequence[str], addresses: Mapping[str, str]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return pairs of ranks: of one host of each machine at once, then of two hosts in turn."""
    first = {host: rank for rank, host in reversed(list(enumerate(hosts)))}
    on_machine: dict[str, list[tuple[int, int]]] = {}
    for rank in range(len(hosts) - 1):
        if hosts[rank] == hosts[rank + 1]:
            on_machine.setdefault(addresses[hosts[rank]], []).append((rank, rank + 1))
    inside = [tuple(filter(None, pairs)) for pairs in zip_longest(*on_machine.values())]
    ranks = sorted(first.values())
    across = combinations(ranks, 2) if len(ranks) <= MAX_HOSTS else pairwise(ranks)
    return (*inside, *((pair,) for pair in across))


def _predicted_s(sample: Timing, network: Network, ends: Sequence[str]) -> float:
    if sample.kind == "all_reduce":
        phases = collectives.all_reduce(network, ends, sample.nbytes)
    else:
        phases = collectives.all_gather(network, ends, [sample.nbytes / len(ends)] * len(ends))
    return seconds_of(network, phases)
