"""Where hosts are: as the cluster file says, or on the nodes that somebody has allotted."""

import socket
from pathlib import Path

import pytest

from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster, encode_cluster
from partc.cost.cluster.machines import Device, Host, Link
from partc.runtime.engines.allotted_nodes import HOST_FILES, allotted_nodes
from partc.runtime.engines.external_launch import check_place, seen_by_others
from partc.runtime.engines.machines import Machine, Machines, machines_at, machines_of
from partc.runtime.engines.place import Place, own_place
from partc.runtime.errors import BadUsage
from partc.runtime.plan.plan_folder import read_plan_folder
from tests.builders.plans.linear_plans import linear_all_reduce

NOWHERE = Machines.at({"alpha": "localhost", "beta": "localhost"})
SIGNS = (
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALNRANKS",
    "OMPI_COMM_WORLD_RANK",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
)


@pytest.fixture(autouse=True)
def nobody_allots(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*HOST_FILES, *SIGNS, "SLURM_JOB_ID", "SLURM_JOB_NODELIST"):
        monkeypatch.delenv(name, raising=False)


def test_a_cluster_file_says_how_hosts_start_processes(tmp_path: Path) -> None:
    device = (Device("cpu0", "cpu", "cpu-core"),)
    host = Host("a", device, 1 << 30, "10.0.0.1", environment={"LD_LIBRARY_PATH": "/x"}, python="/x/python")
    cluster = Cluster(CLUSTER_FORMAT, "one", (host,), mpiexec=("-iface", "ib0"))
    (tmp_path / "cluster.json").write_bytes(encode_cluster(cluster))

    machines = machines_of(tmp_path)

    assert machines.of("a") == Machine("a", "10.0.0.1", {"LD_LIBRARY_PATH": "/x"}, "/x/python")
    assert machines.mpiexec == ("-iface", "ib0")
    assert machines_of(tmp_path / "none").addresses == {}


def test_hosts_without_addresses_are_on_the_allotted_nodes_in_order() -> None:
    assert NOWHERE.on(("n3", "n7", "n9"), ["alpha", "beta"]).addresses == {"alpha": "n3", "beta": "n7"}
    assert NOWHERE.on(("n3",), ["alpha", "beta"]) is NOWHERE, "all on one node"
    assert NOWHERE.on((), ["alpha", "beta"]) is NOWHERE
    assert NOWHERE.on((socket.gethostname(),), ["alpha"]) is NOWHERE
    assert NOWHERE.on(("worker-0",), ["alpha"]).of("alpha").address == "worker-0", "not where this runs"
    known = Machines.at({"alpha": "10.0.0.1", "beta": "10.0.0.2"})
    assert known.on(("n3", "n7"), ["alpha", "beta"]) is known


def test_an_address_of_a_host_that_the_plan_has_not_is_refused(tmp_path: Path) -> None:
    folder = read_plan_folder(linear_all_reduce(tmp_path / "out", 2))
    host = folder.plan.ranks[0].host

    assert machines_at(folder, {host: "10.0.0.1"}).addresses == {host: "10.0.0.1"}
    with pytest.raises(BadUsage, match=r"(?s)the plan has no host 'zz'.*fix: use one of alpha"):
        machines_at(folder, {"zz": "10.0.0.1"})


def test_fewer_nodes_than_hosts_are_refused() -> None:
    with pytest.raises(BadUsage, match=r"3 hosts, 2 nodes are allotted\n  at:  nodes n3, n7"):
        NOWHERE.on(("n3", "n7"), ["alpha", "beta", "gamma"])


def test_slurms_nodes_are_those_of_its_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n3,gpu[08-10]")
    assert allotted_nodes() == ("n3", "gpu08", "gpu09", "gpu10")

    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[3-")
    with pytest.raises(BadUsage, match=r"no list of nodes\n  at:  SLURM_JOB_NODELIST=n\[3-"):
        allotted_nodes()


@pytest.mark.parametrize("lines", ["w-0.job slots=2\nw-1.job slots=2\n", "w-0.job:2\nw-1.job:2\n# end\n\n"])
def test_mpi_operators_file_of_hosts_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str
) -> None:
    (tmp_path / "hostfile").write_text(lines)
    monkeypatch.setenv("HYDRA_HOST_FILE", str(tmp_path / "hostfile"))

    assert allotted_nodes() == ("w-0.job", "w-1.job")

    monkeypatch.setenv("HYDRA_HOST_FILE", str(tmp_path / "none"))
    with pytest.raises(BadUsage, match="HYDRA_HOST_FILE"):
        allotted_nodes()


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, (1, 4, True)),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, (1, 4, False)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4, False)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),  # a batch script, before srun
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "1"}, (2, 4, True)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "SLURM_STEP_NUM_NODES": "2"}, (2, 4, False)),
    ],
)
def test_the_environment_tells_who_was_started_together(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], place: tuple[int, int, bool] | None
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    found = own_place()

    assert (found and (found.rank, found.size, found.is_one_machine)) == place


def test_keepers_find_the_first_rank_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ["alpha", "beta"]
    known = Machines.at({"alpha": "10.0.0.1", "beta": "10.0.0.2"})

    assert seen_by_others(known, hosts, Place(0, 2, True, "a test")).addresses == {}
    assert seen_by_others(known, hosts, Place(0, 2, False, "a test")) is known
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "127.0.0.1")
    with pytest.raises(BadUsage, match="nothing tells under which address"):
        seen_by_others(NOWHERE, hosts, Place(0, 2, False, "a test"))


def test_what_others_have_started_must_be_the_plans_ranks() -> None:
    place = Place(0, 4, True, "PMI_RANK, PMI_SIZE")

    check_place(place, 4, 0, False)
    with pytest.raises(BadUsage, match=r"the plan has 3 ranks\n  at:  PMI_RANK, PMI_SIZE: 4 processes"):
        check_place(place, 3, 0, False)
    with pytest.raises(BadUsage, match="--restarts 2"):
        check_place(place, 4, 2, False)
    with pytest.raises(BadUsage, match="asynchronous"):
        check_place(place, 4, 0, True)


def test_links_are_not_needed_to_start_processes(tmp_path: Path) -> None:
    device = Device("cpu0", "cpu", "cpu-core")
    hosts = (Host("a", (device,), 1 << 30), Host("b", (Device("cpu1", "cpu", "cpu-core"),), 1 << 30))
    cluster = Cluster(CLUSTER_FORMAT, "two", hosts, links=(Link(("a", "b"), 1e9),))
    (tmp_path / "cluster.json").write_bytes(encode_cluster(cluster))

    assert machines_of(tmp_path).addresses == {"a": "localhost", "b": "localhost"}
