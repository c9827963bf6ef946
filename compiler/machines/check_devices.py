"""Whether what a cluster file says of this machine's GPUs can be run here."""

import socket

from partc.cost.cluster.cluster import Cluster
from partc.runtime.engines.allotted_nodes import allotted_nodes
from partc.runtime.engines.host_check import gpu_lacks
from partc.runtime.errors import BadUsage

_HERE = ("localhost", "127.0.0.1", "::1")


def unusable_gpus(cluster: Cluster) -> list[str]:
    """Return a sentence where this machine has no use for GPUs that are to be its own; `partc run` refuses.

    Hosts without an address are this machine, unless a batch system allots nodes: those are looked at by the
    ranks there, before their first step.
    """
    here = (*_HERE, socket.gethostname())
    devices = [
        device
        for host in cluster.hosts
        if host.address in here
        for device in host.devices
        if device.kind == "gpu"
    ]
    if not devices or _has_nodes():
        return []
    for device in devices:
        for lack in gpu_lacks(device.name, device.index):
            others = f", as do {len(devices) - 1} more" if len(devices) > 1 else ""
            return [
                f"here, `partc run` will be refused: {lack.what}{others}. To run here, {lack.fix}; to run "
                "elsewhere, write the hosts' addresses in the cluster file"
            ]
    return []


def _has_nodes() -> bool:
    try:
        return bool(allotted_nodes())
    except BadUsage:
        return True
