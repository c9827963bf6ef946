import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from partc.cost.cluster.cluster import (
    CLUSTER_FORMAT,
    Cluster,
    groups_of,
    ranks_of,
    read_cluster,
    read_resource_file,
)
from partc.cost.cluster.machines import Device, Host, Link
from partc.cost.network.topology import Lane, Network
from partc.cost.network.traffic import MessageTraffic, Phase, lane_loads
from partc.runtime.errors import BadCluster

EXAMPLES = Path(__file__).parents[3] / "examples"

Json = dict[str, Any]  # a cluster file that a test is about to break


def cpus(host: str, count: int) -> tuple[Device, ...]:
    return tuple(Device(f"{host}/cpu{i}", "cpu", "cpu-core") for i in range(count))


def gpus(host: str, count: int) -> tuple[Device, ...]:
    return tuple(Device(f"{host}/gpu{i}", "gpu", "titan-xp", index=i) for i in range(count))


def switched(*hosts: Host) -> Cluster:
    links = tuple(Link((host.name, "switch"), bytes_per_s=1e9, latency_s=1e-5) for host in hosts)
    return Cluster(CLUSTER_FORMAT, "switched", hosts, switches=("switch",), links=links)


@pytest.mark.parametrize("file", sorted(path.name for path in EXAMPLES.glob("cluster-*.json")))
def test_examples_are_read(file: str) -> None:
    cluster = read_cluster(EXAMPLES / file)

    hosts, devices = (int(part) for part in file.split("-")[1].removesuffix(".json").split("x"))
    assert len(cluster.hosts) == hosts
    assert {len(host.devices) for host in cluster.hosts} == {devices}


# ---------------------------------------------------------------- mistakes


def rename_link_end(cluster: Json) -> None:
    cluster["links"][0]["ends"][1] = "host7"


def zero_bandwidth(cluster: Json) -> None:
    cluster["links"][0]["bytes_per_s"] = 0


def no_bandwidth(cluster: Json) -> None:
    del cluster["links"][0]["bytes_per_s"]


def negative_latency(cluster: Json) -> None:
    cluster["links"][0]["latency_s"] = -1.0


def link_to_itself(cluster: Json) -> None:
    cluster["links"][0]["ends"] = ["host0", "host0"]


def second_link(cluster: Json) -> None:
    cluster["links"].append({"ends": ["host1", "host0"], "bytes_per_s": 1.0})


def no_links(cluster: Json) -> None:
    cluster["links"] = []


def same_host_twice(cluster: Json) -> None:
    cluster["hosts"][1]["name"] = "host0"


def same_device_twice(cluster: Json) -> None:
    cluster["hosts"][1]["devices"][0]["name"] = "host0/cpu0"


def no_devices(cluster: Json) -> None:
    cluster["hosts"][1]["devices"] = []


def no_hosts(cluster: Json) -> None:
    cluster["hosts"] = []


def unknown_profile(cluster: Json) -> None:
    cluster["hosts"][0]["devices"][1]["profile"] = "abacus"


def cpu_as_gpu(cluster: Json) -> None:
    cluster["hosts"][0]["devices"][1]["kind"] = "gpu"


def no_threads(cluster: Json) -> None:
    cluster["hosts"][0]["devices"][1]["threads"] = 0


def text_for_number(cluster: Json) -> None:
    cluster["hosts"][1]["memory_bytes"] = "lots"


def unknown_key(cluster: Json) -> None:
    cluster["hosts"][1]["gpus"] = 4


def other_format(cluster: Json) -> None:
    cluster["format"] = "partc-cluster/9"


def greedy_devices(cluster: Json) -> None:
    for device in cluster["hosts"][0]["devices"]:
        device["memory_bytes"] = 3 * 2**30


def variable_with_a_space(cluster: Json) -> None:
    cluster["hosts"][0]["environment"] = {"LD PATH": "/x"}


def variable_of_ranks(cluster: Json) -> None:
    cluster["hosts"][0]["environment"] = {"PMI_RANK": "0"}


def number_as_a_variables_value(cluster: Json) -> None:
    cluster["hosts"][0]["environment"] = {"THREADS": 4}


def option_as_python(cluster: Json) -> None:
    cluster["hosts"][1]["python"] = "-c"


def empty_option(cluster: Json) -> None:
    cluster["mpiexec"] = ["-iface", ""]


@pytest.mark.parametrize(
    ("spoil", "what", "at", "fix"),
    [
        (variable_with_a_space, "no environment variable: 'LD PATH'", "environment", "letters"),
        (variable_of_ranks, "'PMI_RANK' is set for every rank", "environment", "leave it out"),
        (number_as_a_variables_value, "Expected `str`", "environment", "schema"),
        (option_as_python, "no path of an interpreter: '-c'", "hosts[1] (host1): python", "/opt"),
        (empty_option, "no word of a command line", "mpiexec[1]", "-iface"),
        (rename_link_end, "unknown device, host or switch 'host7'", "links[0]", "host1"),
        (zero_bandwidth, "without bandwidth: 0.0 bytes/s", "links[0]: host0 -> host1: bytes_per_s", "125e6"),
        (no_bandwidth, "missing required field `bytes_per_s`", "$.links[0]", "schema"),
        (negative_latency, "latency of -1.0 s", "latency_s", "0 or more"),
        (link_to_itself, "to itself", "links[0]", "two different ends"),
        (second_link, "second link between the same ends as links[0]", "links[1]", "sum of both rates"),
        (no_links, "no path from 'host0' to 'host1'", "hosts[1].name", "add a link"),
        (same_host_twice, "the name 'host0' twice", "hosts[0].name and hosts[1].name", "host0-2"),
        (same_device_twice, "'host0/cpu0' twice", "hosts[1].devices[0].name", "rename"),
        (no_devices, "a host without devices", "hosts[1] (host1): devices", "add a device"),
        (no_hosts, "no hosts", "hosts", "one host at least"),
        (unknown_profile, "unknown profile 'abacus'", "devices[1] (host0/cpu1): profile", "titan-xp, v100"),
        (cpu_as_gpu, "a gpu with the profile 'cpu-core'", "profile", "cpu-core"),
        (no_threads, "0 is not a positive number", "threads", "1 or more"),
        (text_for_number, "Expected `int`, got `str`", "$.hosts[1].memory_bytes", "schema"),
        (unknown_key, "unknown field `gpus`", "$.hosts[1]", "schema"),
        (other_format, "format 'partc-cluster/9'", "format", "partc-cluster/1"),
        (greedy_devices, "want 6442450944 bytes together, the host has 4294967296", "memory", "2147483648"),
    ],
)
def test_mistakes_name_the_key_the_number_and_the_repair(
    tmp_path: Path, spoil: Callable[[Json], None], what: str, at: str, fix: str
) -> None:
    cluster: Json = msgspec.json.decode((EXAMPLES / "cluster-2x2.json").read_bytes())
    spoil(cluster)
    path = tmp_path / "cluster.json"
    path.write_bytes(msgspec.json.encode(cluster))

    with pytest.raises(BadCluster) as caught:
        read_cluster(path)

    assert what in caught.value.what
    assert str(path) in caught.value.at
    assert at in caught.value.at
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("flops_per_s", 1e-300),
        ("flops_per_s", 0.5),
        ("flops_per_s", 1e308),
        ("cores", 1e-300),
        ("cores", 1e300),
        ("memory_bytes_per_s", 1e-300),
        ("memory_bytes_per_s", 1e300),
        ("memory_bytes", 2**70),
        ("bytes_per_s", 1e-300),
        ("bytes_per_s", 1e300),
        ("latency_s", 1e300),
    ],
)
def test_numbers_that_no_machine_has_are_refused(tmp_path: Path, key: str, number: float) -> None:
    cluster: Json = msgspec.json.decode((EXAMPLES / "cluster-2x2.json").read_bytes())
    described = {
        "flops_per_s": cluster["hosts"][1]["devices"][0],
        "bytes_per_s": cluster["links"][0],
        "latency_s": cluster["links"][0],
    }
    described.get(key, cluster["hosts"][1])[key] = number
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(cluster))

    with pytest.raises(BadCluster) as caught:
        read_cluster(path)

    assert caught.value.at.endswith(f": {key}")


def test_a_file_that_is_no_json_or_not_there_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "cluster.json"
    broken.write_text("{")

    with pytest.raises(BadCluster, match="not JSON"):
        read_cluster(broken)
    with pytest.raises(BadCluster, match="cannot be read"):
        read_cluster(tmp_path / "elsewhere.json")


def test_a_name_written_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"format": "partc-cluster/1", "name": "x", "name": "y", "hosts": []}')

    with pytest.raises(BadCluster, match="the name 'name' is there twice"):
        read_cluster(path)


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN"])
def test_a_number_that_is_not_finite_is_refused_with_its_line(number: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(f'{{"format": "partc-cluster/1",\n "name": "x",\n "links": [{number}]}}')

    with pytest.raises(BadCluster, match=r"line 3: a number that is not finite"):
        read_cluster(path)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("::1", "IPv6"),
        ("fe80::1%eth0", "IPv6"),
        ("10.0.0.1:5", "names no host"),
        ("root@10.0.0.1", "names no host"),
        ("10.0.0.1,10.0.0.2", "names no host"),
        ("10.0.0.1;touch x", "names no host"),
        ("", "names no host"),
    ],
)
def test_an_address_that_is_no_hosts_is_refused(address: str, why: str) -> None:
    host = Host("h", (Device("h/cpu0", "cpu", "cpu-core"),), memory_bytes=2**30, address=address)

    with pytest.raises(BadCluster, match=why) as caught:
        Cluster(CLUSTER_FORMAT, "c", (host,))
    assert caught.value.at == "hosts[0] (h): address"


@pytest.mark.parametrize("address", ["localhost", "10.0.0.1", "node_1", "gpu-3.example.org", "rechner-ä"])
def test_what_networks_call_hosts_is_an_address(address: str) -> None:
    host = Host("h", (Device("h/cpu0", "cpu", "cpu-core"),), memory_bytes=2**30, address=address)

    assert Cluster(CLUSTER_FORMAT, "c", (host,)).hosts == (host,)


# ---------------------------------------------------------------- resource files


def test_the_manuals_resource_file_gives_hosts_and_gpu_ids() -> None:
    cluster = read_resource_file(EXAMPLES / "resource-info.txt")

    assert [[device.index for device in host.devices] for host in cluster.hosts] == [
        [0, 1, 2, 3, 4, 5],
        [1, 3, 4],
    ]
    assert cluster.hosts[1].address == "10.0.0.2"
    assert {device.profile for host in cluster.hosts for device in host.devices} == {"titan-xp"}


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("a: 0,1 a100\nb: 0;1\n", "0,1,2"),
        ("a: 0 k80\na: 1 k80\n", "rename"),
        ("a: 0,0 p100\n", "its own index"),
        ("farhost\n", "`farhost: 0,1 a100`"),
    ],
)
def test_a_resource_file_that_cannot_be_understood_is_refused(tmp_path: Path, text: str, fix: str) -> None:
    path = tmp_path / "resource-info.txt"
    path.write_text(text)

    with pytest.raises(BadCluster) as caught:
        read_resource_file(path)

    assert fix in caught.value.fix


def test_gpu_ids_left_out_are_detected_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "resource-info.txt"
    path.write_text("localhost\n")
    monkeypatch.setenv("PATH", "")

    with pytest.raises(BadCluster) as caught:
        read_resource_file(path)

    assert "nvidia-smi is not installed" in caught.value.what
    assert "`localhost: 0,1 a100`" in caught.value.fix


def test_detected_gpus_become_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nprintf '0, NVIDIA H200, 143771\\n1, NVIDIA H200, 143771\\n'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    path = tmp_path / "resource-info.txt"
    path.write_text("localhost\n")

    cluster = read_resource_file(path)

    assert [device.index for device in cluster.hosts[0].devices] == [0, 1]


# ---------------------------------------------------------------- ranks


def test_a_cpu_hosts_server_shares_its_first_workers_process() -> None:
    cluster = switched(Host("a", cpus("a", 2), 2**30), Host("b", cpus("b", 2), 2**30))

    ranks = ranks_of(cluster)

    assert [rank.sites for rank in ranks] == [("worker", "server"), ("worker",)] * 2
    assert [rank.replica for rank in ranks] == [0, 1, 2, 3]
    assert groups_of(cluster) == {
        "workers": [(0, 1, 2, 3)],
        "host_workers": [(0, 1), (2, 3)],
        "leaders": [(0, 2)],
        "servers": [(0, 2)],
        "host": [(0, 1), (2, 3)],
        "feed": [(0,), (2,)],
    }


def test_a_gpu_hosts_server_is_a_process_of_its_own_after_all_workers() -> None:
    cluster = switched(Host("a", gpus("a", 2), 2**30), Host("b", cpus("b", 1), 2**30))

    ranks = ranks_of(cluster)

    assert [(rank.host, rank.device, rank.sites) for rank in ranks] == [
        ("a", "a/gpu0", ("worker",)),
        ("a", "a/gpu1", ("worker",)),
        ("b", "b/cpu0", ("worker", "server")),
        ("a", "a", ("server",)),
    ]
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]
    assert groups_of(cluster)["host"] == [(3, 0, 1), (2,)]
    assert groups_of(cluster)["servers"] == [(3, 2)]


def test_the_server_joins_the_first_cpu_worker_even_behind_a_gpu() -> None:
    cluster = switched(Host("a", (*gpus("a", 1), *cpus("a", 1)), 2**30))

    assert [rank.sites for rank in ranks_of(cluster)] == [("worker",), ("worker", "server")]
    assert groups_of(cluster)["host"] == [(1, 0)]


# ---------------------------------------------------------------- topology


def carried(network: Network, messages: dict[tuple[str, str], float]) -> dict[Lane, float]:
    """Return the bytes of the lanes that carry any."""
    hops = network.hops_between(list(messages))
    phase = Phase((MessageTraffic(hops, np.array(list(messages.values()))),), 0.0)
    loads = lane_loads(network, (phase,))
    return {lane: load for lane, load in zip(network.lanes, loads.tolist(), strict=True) if load}


def test_a_route_between_hosts_passes_both_uplinks_and_adds_latencies() -> None:
    network = Network(switched(Host("a", gpus("a", 1), 2**30), Host("b", gpus("b", 1), 2**30)))

    route = network.route("a", "b")

    assert route.latency_s == pytest.approx(2e-5)
    assert route.bytes_per_s == 1e9
    assert {("a", "switch"), ("switch", "b")} <= set(route.lanes)


def test_the_quicker_of_two_ways_is_taken_and_its_narrowest_lane_counts() -> None:
    hosts = tuple(Host(name, gpus(name, 1), 2**30) for name in "abc")
    links = (Link(("a", "b"), 1e6), Link(("a", "c"), 1e9), Link(("c", "b"), 5e8))
    network = Network(Cluster(CLUSTER_FORMAT, "triangle", hosts, links=links))

    route = network.route("a/gpu0", "b/gpu0")

    assert ("a", "c") in route.lanes
    assert ("a", "b") not in route.lanes
    assert route.bytes_per_s == 5e8


def test_a_device_without_a_link_goes_through_its_hosts_memory() -> None:
    network = Network(switched(Host("a", cpus("a", 2), 2**30, memory_bytes_per_s=7e9)))

    loads = carried(network, {("a/cpu0", "a/cpu1"): 100.0})

    assert loads == {("a", "memory"): 200.0}  # written, then read
    assert network.route("a/cpu0", "a/cpu1").bytes_per_s == 7e9


def test_both_directions_of_a_link_are_lanes_of_their_own() -> None:
    network = Network(switched(Host("a", cpus("a", 1), 2**30), Host("b", cpus("b", 1), 2**30)))

    loads = carried(network, {("a/cpu0", "b/cpu0"): 10.0, ("b/cpu0", "a/cpu0"): 4.0})

    assert loads["a", "switch"] == loads["switch", "b"] == 10.0
    assert loads["b", "switch"] == loads["switch", "a"] == 4.0
