"""Other clusters like a given one: as a person would edit its cluster.json.

Every function returns a new cluster, checked as any other. Raises BadCluster where it cannot be.
"""

from collections.abc import Callable, Collection

import msgspec

from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.machines import Device, Host, Link
from partc.runtime.errors import BadCluster


def with_link_rates(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with links that are so many times as quick."""
    links = tuple(
        msgspec.structs.replace(link, bytes_per_s=link.bytes_per_s * factor) for link in cluster.links
    )
    return msgspec.structs.replace(cluster, links=links)


def with_latencies(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with links of so many times the latency."""
    links = tuple(msgspec.structs.replace(link, latency_s=link.latency_s * factor) for link in cluster.links)
    return msgspec.structs.replace(cluster, links=links)


def with_profile(cluster: Cluster, profile: str) -> Cluster:
    """Return the cluster with other GPUs, of a profile of profiles.py; CPUs stay."""

    def changed(device: Device) -> Device:
        return device if device.kind == "cpu" else msgspec.structs.replace(device, profile=profile)

    return _with_devices(cluster, lambda host: tuple(map(changed, host.devices)), 1)


def with_threads(cluster: Cluster, factor: int) -> Cluster:
    """Return the cluster with so many times the threads of every CPU, and so many times the cores."""

    def changed(device: Device) -> Device:
        return (
            device
            if device.kind == "gpu"
            else msgspec.structs.replace(device, threads=device.threads * factor)
        )

    return _with_devices(cluster, lambda host: tuple(map(changed, host.devices)), factor)


def _with_devices(cluster: Cluster, devices: Callable[[Host], tuple[Device, ...]], cores: int) -> Cluster:
    hosts = tuple(
        msgspec.structs.replace(
            host, devices=devices(host), cores=None if host.cores is None else host.cores * cores
        )
        for host in cluster.hosts
    )
    return msgspec.structs.replace(cluster, hosts=hosts)


def with_hosts(cluster: Cluster, count: int) -> Cluster:
    """Return so many of a cluster's hosts, the first ones; if there are fewer, the last one is repeated.

    What is repeated is linked as the last host is: to the same switches and hosts, and where that one is
    linked to hosts without a switch, to it and to each other alike.
    """
    first_hosts, last = cluster.hosts[:count], cluster.hosts[-1]
    names = {name for host in first_hosts for name in _names(host)}
    left_out = {name for host in cluster.hosts for name in _names(host)} - names
    inner = _inner_switches(cluster, last)
    own = (*_names(last), *inner)
    direct = _direct_link(cluster, own)
    if count > len(cluster.hosts) and not any(_leaves(link, own) for link in cluster.links):
        raise BadCluster(
            f"no link that leads out of {last.name!r}, for another host to be linked alike",
            at="links",
            fix="name a switch, and link the host to it as it would be linked to others",
        )
    hosts, switches = list(first_hosts), list(cluster.switches)
    links = [link for link in cluster.links if left_out.isdisjoint(link.ends)]
    alike = [dict(zip(own, own, strict=True))]
    for number in range(len(cluster.hosts) + 1, count + 1):
        renamed = {name: f"{name}-{number}" for name in own}
        devices = tuple(msgspec.structs.replace(d, name=renamed[d.name]) for d in last.devices)
        hosts.append(msgspec.structs.replace(last, name=renamed[last.name], devices=devices))
        switches += [renamed[switch] for switch in inner]
        links += [_renamed(link, renamed) for link in cluster.links if renamed.keys() & set(link.ends)]
        if direct is not None:
            link, end = direct
            ends = [(other[end], renamed[end]) for other in alike]
            links += [msgspec.structs.replace(link, ends=pair) for pair in ends]
        alike.append(renamed)
    parts = {"hosts": tuple(hosts), "switches": tuple(switches), "links": tuple(links)}
    return msgspec.structs.replace(cluster, **parts)


def _leaves(link: Link, own: Collection[str]) -> bool:
    return len(set(link.ends) - set(own)) == 1


def _direct_link(cluster: Cluster, own: Collection[str]) -> tuple[Link, str] | None:
    """Return a link from a host to another one without a switch, and its end here; None if there is none."""
    for link in cluster.links:
        here = [end for end in link.ends if end in own]
        if len(here) == 1 and not set(link.ends) & set(cluster.switches):
            return link, here[0]
    return None


def _inner_switches(cluster: Cluster, host: Host) -> tuple[str, ...]:
    """Return the switches that join nothing but what is in a host."""
    inside = {*_names(host), *cluster.switches}
    while outer := {
        end
        for link in cluster.links
        for end in link.ends
        if end in inside and end in cluster.switches and not inside.issuperset(link.ends)
    }:
        inside -= outer
    linked = {end for link in cluster.links for end in link.ends}
    return tuple(switch for switch in cluster.switches if switch in inside & linked)


def _names(host: Host) -> tuple[str, ...]:
    return (host.name, *(device.name for device in host.devices))


def _renamed(link: Link, renamed: dict[str, str]) -> Link:
    one, other = (renamed.get(end, end) for end in link.ends)
    return msgspec.structs.replace(link, ends=(one, other))
