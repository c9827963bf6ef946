"""Kernels' times as they were measured, in profile.json: what `partc profile` writes and prices take.

A time is of one kernel (passes/scheduling/kernels.py tells what its key says) on one kind of device, by one
version of each library: times of other devices and versions lie beside it in the same file.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Literal

import msgspec

from partc.cost.cluster.cluster import Cluster, ClusterRank, ranks_of
from partc.cost.cluster.profiles import profiles_sha256
from partc.runtime.errors import BadProfile
from partc.runtime.plan.plan_json import NOT_DECODED, why_not_decoded
from partc.runtime.plan.record import Record

PROFILE_FORMAT = "partc-profile/1"

DeviceKind = tuple[str, str, int]  # kind, profile and threads, as cluster.json has them


class Versions(Record, frozen=True):
    """What kernels were measured with."""

    onnxruntime: str
    onnx: str
    partc: str


class MeasuredDevice(Record, frozen=True):
    """Kernels' times on a kind of device.

    kind, profile, threads  of the devices of cluster.json that it stands for
    name                    of the device that was measured
    seconds                 kernel -> of one run, beyond what starting any node takes
    unmeasured              kernel -> why it cannot be run by itself
    """

    kind: Literal["cpu", "gpu"]
    profile: str
    threads: int
    name: str
    versions: Versions
    seconds: dict[str, float] = msgspec.field(default_factory=dict)
    unmeasured: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def device(self) -> DeviceKind:
        """Return what it stands for."""
        return self.kind, self.profile, self.threads

    @property
    def source(self) -> tuple[DeviceKind, str, Versions]:
        """Return what its times are of."""
        return self.device, self.name, self.versions


class Profile(Record, frozen=True):
    """A file of measured kernels."""

    format: str = PROFILE_FORMAT
    unit: Literal["s"] = "s"
    devices: tuple[MeasuredDevice, ...] = ()

    def added(self, measured: MeasuredDevice) -> "Profile":
        """Return the profile with more times of a source."""
        others = tuple(d for d in self.devices if d.source != measured.source)
        before = self.of_source(measured)
        seconds, unmeasured = before.seconds | measured.seconds, before.unmeasured | measured.unmeasured
        both = msgspec.structs.replace(measured, seconds=seconds, unmeasured=unmeasured)
        return msgspec.structs.replace(self, devices=(*others, both))

    def of_source(self, like: MeasuredDevice) -> MeasuredDevice:
        """Return what is known of a source."""
        known = (device for device in self.devices if device.source == like.source)
        return next(known, msgspec.structs.replace(like, seconds={}, unmeasured={}))


# ---------------------------------------------------------------- files


def read_profile(path: Path) -> Profile:
    """Read profile.json. Raises BadProfile."""
    text = b""
    try:
        text = path.read_bytes()
        profile = msgspec.json.decode(text, type=Profile)
    except OSError as error:
        fix = "give a file that `partc profile` wrote"
        raise BadProfile(f"cannot be read: {error.strerror}", at=str(path), fix=fix) from error
    except NOT_DECODED as error:
        what, _, where = why_not_decoded(error, text).partition(" - at ")
        raise BadProfile(
            what,
            at=f"{path}: {where.strip('`') or 'the file as a whole'}",
            fix="mend it, or remove it and run `partc profile` again",
        ) from error
    for what, where in _wrong(profile):
        raise BadProfile(
            what, at=f"{path}: {where}", fix="mend it, or remove it and run `partc profile` again"
        )
    return profile


def encode_profile(profile: Profile) -> bytes:
    """Return profile.json: equal profiles give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(profile, order="deterministic"), indent=1) + b"\n"


def _wrong(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a profile, and where."""
    if profile.format != PROFILE_FORMAT:
        yield f"a profile of format {profile.format!r}, not {PROFILE_FORMAT!r}", "format"
    for number, device in enumerate(profile.devices):
        at = f"$.devices[{number}]"
        if device.threads < 1:
            yield f"{device.threads} threads", f"{at}.threads"
        if any(device.source == other.source for other in profile.devices[:number]):
            yield "times of the same device and versions twice", at
        for kernel, seconds in device.seconds.items():
            if not (isfinite(seconds) and seconds >= 0):
                yield f"{seconds} seconds", f"{at}.seconds: {kernel}"


# ---------------------------------------------------------------- prices


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """What prices know of measured kernels, and the part of a profile that it comes from.

    `sha256`: of all of it, empty where nothing is.
    """

    seconds: Mapping[DeviceKind, Mapping[str, float]] = field(default_factory=dict)
    sha256: str = ""
    devices: tuple[MeasuredDevice, ...] = ()

    def on(self, device: DeviceKind) -> Mapping[str, float]:
        """Return kernel -> seconds on a kind of device."""
        return self.seconds.get(device, {})


NO_TIMES = KernelTimes()


def prices_sha256(times: KernelTimes) -> str:
    """Return a hash of all that prices are made of: plans that name the same were priced alike."""
    rates = profiles_sha256()
    return hashlib.sha256(f"{rates} {times.sha256}".encode()).hexdigest() if times.sha256 else rates


def times_for(profile: Profile, cluster: Cluster, versions: Versions) -> tuple[KernelTimes, tuple[str, ...]]:
    """Return what a profile says of a cluster's devices, and what a reader has to know of that, in sentences.

    Where times are of several versions, these ones' are taken, or else those that were measured last.
    Raises BadProfile where it is about none of them.
    """
    needed_kinds = devices_of(cluster)
    device_of: dict[DeviceKind, MeasuredDevice] = {}
    for device in profile.devices:
        before = device_of.get(device.device)
        if device.device in needed_kinds and (before is None or before.versions != versions):
            device_of[device.device] = device
    if not device_of:
        raise BadProfile(
            f"times of {_listed(d.device for d in profile.devices) or 'no device'}, and the cluster has "
            f"{_listed(needed_kinds)}",
            at="devices",
            fix="measure this cluster's devices with `partc profile`, or name the same profile and threads",
        )
    seconds = {kind: device.seconds for kind, device in device_of.items()}
    taken = tuple(device_of[kind] for kind in sorted(device_of))
    digest = hashlib.sha256(msgspec.json.encode(taken, order="deterministic")).hexdigest()
    return KernelTimes(seconds, digest, taken), tuple(_remarks(taken, needed_kinds, versions))


def devices_of(cluster: Cluster) -> dict[DeviceKind, ClusterRank]:
    """Return the kinds of devices that a cluster's ranks run on, and the first rank of each."""
    profiles = {device.name: device.profile for host in cluster.hosts for device in host.devices}
    rank_of: dict[DeviceKind, ClusterRank] = {}
    for rank in ranks_of(cluster):
        threads = rank.threads if rank.kind == "cpu" else 1
        rank_of.setdefault((rank.kind, profiles.get(rank.device, "cpu-core"), threads), rank)
    return rank_of


def _remarks(
    taken: tuple[MeasuredDevice, ...], needed_kinds: Iterable[DeviceKind], versions: Versions
) -> Iterator[str]:
    for device in taken:
        there, here = device.versions, versions
        if (there.onnxruntime, there.onnx) != (here.onnxruntime, here.onnx):
            yield (
                f"kernels of {device.profile} were measured with onnxruntime {there.onnxruntime} and onnx "
                f"{there.onnx}; here are {here.onnxruntime} and {here.onnx}: `partc profile` measures again"
            )
    known = {device.device for device in taken}
    if missing := [kind for kind in needed_kinds if kind not in known]:
        yield f"the profile has no times of {_listed(missing)}: the roofline prices these"


def _listed(kinds: Iterable[DeviceKind]) -> str:
    return ", ".join(f"{profile} ({kind}, threads: {threads})" for kind, profile, threads in kinds)
