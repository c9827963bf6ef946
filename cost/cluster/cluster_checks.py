"""What a cluster must satisfy before anything is computed from it. Every failure is a BadCluster."""

import re
from collections.abc import Iterator

import networkx as nx

from partc.cost.cluster.machines import Device, Host, Link
from partc.cost.cluster.profiles import PROFILES
from partc.runtime.errors import BadCluster, one_of, some_of

# Bytes, and bytes per second: beyond any machine, and well inside the solvers' 64 bits.
MOST = 1e16
LONGEST_S = 3600.0
_RANKS_OWN = ("PMI_", "PMIX_", "OMPI_COMM_", "SLURM_PROCID", "PARTC_PULSE", "PARTC_ENTERED")
MOST_THREADS = 1 << 16
MOST_FLOPS_PER_S = 1e18
_ADDRESS = re.compile(r"\w[\w.-]*")
LEAST_CORES = 1e-3  # what Kubernetes and cgroups count quotas in

Named = list[tuple[str, str]]  # (name, where it is given)


def check_machines(hosts: tuple[Host, ...], switches: tuple[str, ...], links: tuple[Link, ...]) -> None:
    """Raise BadCluster with the key, the number that was missed and the repair."""
    if not hosts:
        raise BadCluster("no hosts", at="hosts", fix="describe one host at least, with one device")
    for i, host in enumerate(hosts):
        _check_host(host, f"hosts[{i}] ({host.name})")
    names = list(_names(hosts, switches))
    _check_names(names)
    _check_links(links, {name for name, _ in names})
    _check_paths(hosts, links, [(name, at) for name, at in names if name not in switches])


def check_mpiexec_options(options: tuple[str, ...]) -> None:
    """Raise BadCluster where what mpiexec is told cannot be words of a command line."""
    for i, option in enumerate(options):
        if not option or "\0" in option:
            raise BadCluster(
                f"{option!r} is no word of a command line",
                at=f"mpiexec[{i}]",
                fix='write each word by itself, such as ["-iface", "ib0"]',
            )


def _check_host(host: Host, at: str) -> None:
    if not host.devices:
        raise BadCluster("a host without devices", at=f"{at}: devices", fix="add a device, or drop the host")
    _check_positive(host.memory_bytes, f"{at}: memory_bytes", "the host's memory in bytes")
    _check_positive(host.memory_bytes_per_s, f"{at}: memory_bytes_per_s", "such as 25e9")
    if host.memory_bytes_per_s < 1:
        raise BadCluster("a memory slower than 1 byte/s", at=f"{at}: memory_bytes_per_s", fix="write 25e9")
    if host.cores is not None and not LEAST_CORES <= host.cores <= MOST_THREADS:
        raise BadCluster(
            f"{host.cores} cores",
            at=f"{at}: cores",
            fix=f"write {LEAST_CORES} to {MOST_THREADS}: what its ranks may use, or leave it out",
        )
    _check_address(host.address, f"{at}: address")
    for i, device in enumerate(host.devices):
        _check_device(device, f"{at}: devices[{i}] ({device.name})")
    _check_gpu_indices(host, at)
    _check_memory_of_cpus(host, at)
    _check_processes(host, at)


def _check_address(address: str, at: str) -> None:
    """Refuse what no launcher and no ssh would take for one host's name."""
    if _ADDRESS.fullmatch(address):
        return
    is_ipv6 = address.count(":") > 1
    raise BadCluster(
        f"{address!r} is an IPv6 address, which ranks do not listen at"
        if is_ipv6
        else f"{address!r} names no host",
        at=at,
        fix="write the host's name as the network or ~/.ssh/config knows it, or its IPv4 address",
    )


def _check_device(device: Device, at: str) -> None:
    if device.profile not in PROFILES:
        raise BadCluster(
            f"unknown profile {device.profile!r}",
            at=f"{at}: profile",
            fix=one_of(sorted(PROFILES), device.profile),
        )
    if (device.kind == "cpu") != (device.profile == "cpu-core"):
        raise BadCluster(
            f"a {device.kind} with the profile {device.profile!r}",
            at=f"{at}: profile",
            fix="a cpu has the profile 'cpu-core'; a gpu has one of the others",
        )
    _check_positive(device.threads, f"{at}: threads", "1 or more")
    if device.threads > MOST_THREADS:
        raise BadCluster(f"{device.threads} threads", at=f"{at}: threads", fix="write what the device has")
    if device.flops_per_s is not None and not 1 <= device.flops_per_s <= MOST_FLOPS_PER_S:
        raise BadCluster(
            f"a rate of {device.flops_per_s} operations/s",
            at=f"{at}: flops_per_s",
            fix="write what it sustains in products, such as 90e9 for a core, or null for the profile's",
        )
    if device.index < 0:
        raise BadCluster(f"negative index {device.index}", at=f"{at}: index", fix="count GPUs from 0")
    if device.memory_bytes is not None:
        _check_positive(device.memory_bytes, f"{at}: memory_bytes", "the device's memory in bytes, or null")


def _check_gpu_indices(host: Host, at: str) -> None:
    names: dict[int, str] = {}
    for device in host.devices:
        if device.kind != "gpu":
            continue
        if device.index in names:
            raise BadCluster(
                f"{names[device.index]!r} and {device.name!r} are both GPU {device.index}",
                at=f"{at}: devices",
                fix="give every GPU of a host its own index",
            )
        names[device.index] = device.name


def _check_memory_of_cpus(host: Host, at: str) -> None:
    total_bytes = sum(device.memory_bytes or 0 for device in host.devices if device.kind == "cpu")
    if total_bytes > host.memory_bytes:
        raise BadCluster(
            f"its CPU devices want {total_bytes} bytes together, the host has {host.memory_bytes}",
            at=f"{at}: memory_bytes",
            fix=f"lower the devices' memory_bytes by {total_bytes - host.memory_bytes} together",
        )


def _check_processes(host: Host, at: str) -> None:
    """Check what the host's processes are started with."""
    for name, value in host.environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            raise BadCluster(
                f"no environment variable: {name!r} with the value {value!r}",
                at=f"{at}: environment",
                fix="name it by letters, digits and underscores, and write its value as text",
            )
        if name.startswith(_RANKS_OWN):
            raise BadCluster(
                f"the environment variable {name!r} is set for every rank by what starts it",
                at=f"{at}: environment",
                fix="leave it out",
            )
    if host.python.startswith("-") or any(character in host.python for character in "\0\n"):
        raise BadCluster(
            f"no path of an interpreter: {host.python!r}",
            at=f"{at}: python",
            fix="write the path of a Python that has partc, as /opt/partc/bin/python, or leave it out",
        )


def _check_positive(number: float, at: str, what: str) -> None:
    if not 0 < number <= MOST:
        raise BadCluster(f"{number} is not a positive number below {MOST:.0e}", at=at, fix=f"write {what}")


def _check_names(names: Named) -> None:
    places: dict[str, str] = {}
    for name, at in names:
        if not name:
            raise BadCluster("an empty name", at=at, fix="name it")
        if name in places:
            raise BadCluster(
                f"the name {name!r} twice", at=f"{places[name]} and {at}", fix=f"rename one, such as {name}-2"
            )
        places[name] = at


def _names(hosts: tuple[Host, ...], switches: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield all names that a link may mention, and where they are given."""
    for i, host in enumerate(hosts):
        yield host.name, f"hosts[{i}].name"
        for j, device in enumerate(host.devices):
            yield device.name, f"hosts[{i}].devices[{j}].name"
    for i, switch in enumerate(switches):
        yield switch, f"switches[{i}]"


def _check_links(links: tuple[Link, ...], known: set[str]) -> None:
    numbers: dict[frozenset[str], int] = {}
    for i, link in enumerate(links):
        at = f"links[{i}]: {link.ends[0]} -> {link.ends[1]}"
        if stray := set(link.ends) - known:
            raise BadCluster(
                f"link to unknown device, host or switch {min(stray)!r}",
                at=at,
                fix=f"use one of {some_of(sorted(known))}, or add it",
            )
        if link.ends[0] == link.ends[1]:
            raise BadCluster("a link from an end to itself", at=at, fix="name two different ends")
        if not 1 <= link.bytes_per_s <= MOST:
            raise BadCluster(
                f"a link {'without' if link.bytes_per_s < 1 else 'of impossible'} bandwidth: "
                f"{link.bytes_per_s} bytes/s",
                at=f"{at}: bytes_per_s",
                fix="write its sustained rate in bytes per second: 1 Gbit/s is 125e6",
            )
        if not 0 <= link.latency_s <= LONGEST_S:
            raise BadCluster(
                f"a latency of {link.latency_s} s",
                at=f"{at}: latency_s",
                fix=f"write 0 or more seconds, {LONGEST_S:.0f} at most",
            )
        if (pair := frozenset(link.ends)) in numbers:
            raise BadCluster(
                f"a second link between the same ends as links[{numbers[pair]}]",
                at=at,
                fix="write one link with the sum of both rates",
            )
        numbers[pair] = i


def _check_paths(hosts: tuple[Host, ...], links: tuple[Link, ...], ends: Named) -> None:
    """Every device and host must reach every other, or some collective could never finish."""
    graph = nx.Graph()
    linked = {end for link in links for end in link.ends}
    for host in hosts:
        graph.add_node(host.name)
        graph.add_edges_from((device.name, host.name) for device in host.devices if device.name not in linked)
    graph.add_edges_from(link.ends for link in links)
    start = hosts[0].name
    reached = nx.node_connected_component(graph, start)
    for name, at in ends:
        if name not in reached:
            raise BadCluster(f"no path from {start!r} to {name!r}", at=at, fix="add a link that joins them")
