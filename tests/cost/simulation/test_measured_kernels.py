"""profile.json: whose times it has, which of them count, and what of it is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster
from partc.cost.cluster.machines import Device, Host
from partc.cost.cluster.profiles import profiles_sha256
from partc.cost.simulation.measured_kernels import (
    NO_TIMES,
    MeasuredDevice,
    Profile,
    Versions,
    encode_profile,
    prices_sha256,
    read_profile,
    times_for,
)
from partc.runtime.errors import BadProfile

HERE = Versions("1.31.1", "1.23.0", "0.1.0")
OLD = Versions("1.20.0", "1.23.0", "0.1.0")
CPU = ("cpu", "cpu-core", 1)
NEG = "Neg(float32[2])"


def of(versions: Versions = HERE, seconds: float = 1e-6, **fields: object) -> MeasuredDevice:
    device = MeasuredDevice("cpu", "cpu-core", 1, "EPYC", versions, {NEG: seconds})
    return msgspec.structs.replace(device, **fields)


def cluster(*devices: Device) -> Cluster:
    made = devices or (Device("h/0", "cpu", "cpu-core"),)
    return Cluster(CLUSTER_FORMAT, "c", (Host("h", made, memory_bytes=2**34),))


def test_times_are_added_to_those_of_the_same_device_and_versions() -> None:
    more = of(seconds=2e-6, unmeasured={"If()": "a graph"})
    other = msgspec.structs.replace(more, seconds={"Exp(float32[2])": 3e-6})

    profile = Profile().added(of()).added(of(OLD)).added(other)

    assert len(profile.devices) == 2
    assert profile.of_source(of()).seconds == {NEG: 1e-6, "Exp(float32[2])": 3e-6}
    assert profile.of_source(of()).unmeasured == {"If()": "a graph"}
    assert profile.of_source(of(OLD)).seconds == {NEG: 1e-6}
    assert profile.of_source(of(name="Xeon")).seconds == {}, "another machine is measured by itself"


def test_a_file_is_read_back(tmp_path: Path) -> None:
    profile = Profile().added(of()).added(of(threads=2))
    (tmp_path / "p.json").write_bytes(encode_profile(profile))

    assert read_profile(tmp_path / "p.json") == profile


def test_times_of_these_versions_come_first_and_others_are_told() -> None:
    both = Profile().added(of(OLD, 5e-6)).added(of(HERE, 7e-6)).added(of(OLD, 6e-6))

    times, remarks = times_for(both, cluster(), HERE)
    old, told = times_for(Profile().added(of(OLD, 5e-6)), cluster(), HERE)

    assert times.on(CPU) == {NEG: 7e-6}
    assert remarks == ()
    assert old.on(CPU) == {NEG: 5e-6}
    assert len(told) == 1
    assert "1.20.0" in told[0]
    assert "1.31.1" in told[0]


def test_devices_without_times_are_told_and_none_at_all_is_refused() -> None:
    mixed = cluster(Device("h/0", "cpu", "cpu-core"), Device("h/1", "cpu", "cpu-core", threads=4))

    times, remarks = times_for(Profile().added(of()), mixed, HERE)

    assert times.on(("cpu", "cpu-core", 4)) == {}
    assert "cpu-core (cpu, threads: 4)" in remarks[0]
    with pytest.raises(BadProfile, match=r"cpu-core \(cpu, threads: 1\), and the cluster has .*threads: 4"):
        times_for(Profile().added(of()), cluster(Device("h/1", "cpu", "cpu-core", threads=4)), HERE)
    with pytest.raises(BadProfile, match="no device"):
        times_for(Profile(), cluster(), HERE)


def test_the_hash_of_prices_follows_the_times() -> None:
    hashes = {
        prices_sha256(times_for(Profile().added(of(seconds=seconds)), cluster(), HERE)[0])
        for seconds in (1e-6, 2e-6)
    }

    assert prices_sha256(NO_TIMES) == profiles_sha256()
    assert len(hashes | {profiles_sha256()}) == 3


def put(*path: str | int, value: object) -> Callable[[dict], None]:
    def change(document: dict) -> None:
        at = document
        for part in path[:-1]:
            at = at[part]  # type: ignore[index]
        at[path[-1]] = value  # type: ignore[index]

    return change


DEVICE = ("devices", 0)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (put("format", value="partc-profile/9"), "format"),
        (put("format", value=1), "format"),
        (put("unit", value="ms"), "unit"),
        (put("devices", value={}), "devices"),
        (put("more", value=1), "whole"),
        *((put(*DEVICE, field, value=[]), field) for field in ("kind", "profile", "threads", "name")),
        (put(*DEVICE, "kind", value="tpu"), "kind"),
        (put(*DEVICE, "threads", value=0), "threads"),
        (put(*DEVICE, "versions", value={}), "versions"),
        *(
            (put(*DEVICE, "versions", library, value=1), library)
            for library in ("onnxruntime", "onnx", "partc")
        ),
        (put(*DEVICE, "seconds", value=[]), "seconds"),
        (put(*DEVICE, "seconds", NEG, value=-1.0), NEG.split("(")[0]),
        (put(*DEVICE, "seconds", NEG, value="1"), "seconds"),
        (put(*DEVICE, "seconds", NEG, value=None), "seconds"),
        (put(*DEVICE, "unmeasured", NEG, value=2), "unmeasured"),
        (lambda document: document["devices"].append(document["devices"][0]), "devices[1]"),
        (lambda document: document["devices"][0].pop("name"), "devices[0]"),
    ],
)
def test_a_damaged_field_is_named(tmp_path: Path, change: Callable[[dict], None], where: str) -> None:
    path = tmp_path / "p.json"
    document = json.loads(encode_profile(Profile().added(of(unmeasured={"If()": "a graph"}))))
    change(document)
    path.write_text(json.dumps(document))

    with pytest.raises(BadProfile) as refusal:
        read_profile(path)

    assert str(path) in refusal.value.at
    assert where in refusal.value.at.replace("[...]", "[0]", 1)
    assert "partc profile" in refusal.value.fix


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b"[" * 100_000, b'{"devices": [{"seconds": {"a": 1e999}}]}']
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "p.json").write_bytes(text)

    with pytest.raises(BadProfile):
        read_profile(tmp_path / "p.json")
    with pytest.raises(BadProfile, match="cannot be read"):
        read_profile(tmp_path / "none.json")
