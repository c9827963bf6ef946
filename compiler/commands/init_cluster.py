"""`partc cluster init`: a cluster file of what this machine, a batch system or a resource file tells."""

from collections import Counter
from pathlib import Path

from partc.compiler.commands.arguments import cluster_arguments as arguments
from partc.compiler.commands.arguments.parse_options import parse_bytes
from partc.compiler.commands.console import answer, note, tell
from partc.compiler.commands.results.machines import ClusterWritten
from partc.compiler.machines.make_cluster import MadeCluster, Wishes, make_cluster
from partc.compiler.machines.this_machine import unusable_gpus
from partc.compiler.output.output_paths import check_output_file
from partc.compiler.report.units import plural
from partc.cost.cluster.cluster import encode_cluster
from partc.runtime.errors import BadUsage
from partc.runtime.whole_file import write_whole

EPILOG = """Without --from: the hosts of Slurm or of the MPI operator, within a job; else this machine.

Example: partc cluster init -o cluster.json"""


def init_command(
    output: arguments.NewFile = Path("cluster.json"),
    source: arguments.ClusterSource = "auto",
    devices: arguments.Devices = None,
    workers: arguments.WorkersPerHost = None,
    gpus: arguments.Gpus = None,
    gpu_type: arguments.GpuType = None,
    memory: arguments.Memory = "",
    network: arguments.GbitsPerS = None,
    force: arguments.Force = False,
) -> None:
    """Write a cluster file of this machine, a batch system's hosts, or a resource file."""
    check_output_file(output, (source,))
    if output.exists() and not force:
        raise BadUsage("a file is there already", at=str(output), fix="name another with -o, or give --force")
    if network is not None and not 0 < network < 1e6:
        raise BadUsage(
            f"{network} Gbit/s", at="--network", fix="give what is between two hosts: 10, 100, 400"
        )
    bytes_per_s = network and network * 1e9 / 8
    wishes = Wishes(devices, workers, gpus, gpu_type, parse_bytes(memory, "--memory"), bytes_per_s)
    result = make_cluster(source, wishes)
    write_whole(output, encode_cluster(result.cluster))
    _tell_cluster(result, output)


def _tell_cluster(result: MadeCluster, output: Path) -> None:
    """Say what was written, what of it is assumed, and what GPUs cannot be used here."""
    hosts = result.cluster.hosts
    profiles = Counter(device.profile for host in hosts for device in host.devices)
    counted = ", ".join(f"{count} {profile}" for profile, count in profiles.items())
    tell(f"{plural(len(hosts), 'host')}, {counted}, by {result.source} -> {output}")
    for line in result.assumed:
        note(f"  assumed: {line}")
    warnings = tuple(unusable_gpus(result.cluster))
    for line in warnings:
        tell(f"warning: {line}")
    if len(hosts) > 1:
        note(f"  `partc cluster measure {output} -o measured.json` finds how quick links and cores are")
    answer(
        ClusterWritten(
            output=str(output),
            source=result.source,
            hosts=len(hosts),
            devices=profiles.total(),
            profiles=dict(profiles),
            assumed=result.assumed,
            warnings=warnings,
        )
    )
