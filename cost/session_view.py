"""The cluster as one session of asynchronous training sees it: one worker, and every server.

    cluster   hostA: cpu0 cpu1 (server)     view   session: cpu0         one worker, owns nothing
              hostB: cpu2 cpu3 (server)            hostA:   (server)     a server alone
                                                   hostB:   (server)     a server alone

All workers do the same with the servers, so one view serves them all: the first worker's device stands
for every other. Its host is a host of its own, next to the machine it is on: whatever is summed within a
host is then summed in the worker's process, and what crosses hosts goes straight to the owners.
"""

import msgspec

from partc.cost.cluster import Cluster, Host, Link
from partc.runtime.asynchronous.session import SESSION_HOST


class SessionView(Cluster, frozen=True):
    """A cluster whose servers' hosts have no devices. Made from a checked cluster."""

    def __post_init__(self) -> None:
        """Let hosts be without devices."""


def view_of_session(cluster: Cluster) -> SessionView:
    """Return one worker and all servers of a cluster."""
    home = cluster.hosts[0]
    device = msgspec.structs.replace(home.devices[0], name=f"{SESSION_HOST}/worker")
    worker = Host(
        SESSION_HOST,
        (device,),
        memory_bytes=home.memory_bytes,
        address=home.address,
        server=False,
        memory_bytes_per_s=home.memory_bytes_per_s,
    )
    servers = tuple(msgspec.structs.replace(host, devices=()) for host in cluster.hosts)
    named = {host.name for host in cluster.hosts} | set(cluster.switches)
    links = tuple(link for link in cluster.links if set(link.ends) <= named)
    beside = Link((SESSION_HOST, home.name), bytes_per_s=home.memory_bytes_per_s)
    return SessionView(cluster.format, cluster.name, (worker, *servers), cluster.switches, (*links, beside))
