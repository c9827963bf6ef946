"""The answers of commands about machines and the installation. Times in seconds, sizes in bytes."""

from typing import Literal

from partc.runtime.plan.record import Record


class ProfiledDevice(Record, frozen=True):
    """How many of a step's kernels are known of a kind of device. `share`: of the work, by the roofline."""

    kind: Literal["cpu", "gpu"]
    profile: str
    device: str
    kernels: int
    known: int
    earlier: int
    unmeasured: dict[str, str]
    share: float


class Profiled(Record, frozen=True):
    """`partc profile`: kernels measured on this machine. `remarks`: what is left to the roofline, and why."""

    output: str
    devices: tuple[ProfiledDevice, ...]
    remarks: tuple[str, ...]


class MeasuredPair(Record, frozen=True):
    """A message between two hosts, or two processes of one: latency_s + bytes / bytes_per_s."""

    hosts: tuple[str, str]
    latency_s: float
    bytes_per_s: float
    largest_error: float


class CheckedCollective(Record, frozen=True):
    """What all ranks together take, measured and predicted."""

    kind: str
    bytes: int
    measured_s: float
    predicted_s: float


class ClusterMeasured(Record, frozen=True):
    """`partc cluster measure`: a cluster file with the rates that links have.

    `warnings`: what these rates do not explain of what was measured.
    """

    output: str
    pairs: tuple[MeasuredPair, ...]
    together: tuple[CheckedCollective, ...]
    warnings: tuple[str, ...]


class ClusterWritten(Record, frozen=True):
    """`partc cluster init`: a cluster file. `source`: where it comes from; `assumed`: what nobody told."""

    output: str
    source: str
    hosts: int
    devices: int
    profiles: dict[str, int]  # profile -> how many devices have it
    assumed: tuple[str, ...]
    warnings: tuple[str, ...]


class Check(Record, frozen=True):
    """One thing that was looked at. `fix`: how to get it, where it is missing or fails.

    ok       it is there, and works
    absent   not there, and needed for some uses alone
    failed   partc does not work without it
    """

    name: str
    status: Literal["ok", "absent", "failed"]
    found: str
    fix: str = ""


class Diagnosis(Record, frozen=True):
    """`partc doctor`."""

    healthy: bool
    checks: tuple[Check, ...]


class SchemaList(Record, frozen=True):
    """`partc schema`: the commands whose documents have a schema."""

    commands: tuple[str, ...]


class ExampleEntry(Record, frozen=True):
    """An example, and what it is."""

    name: str
    description: str


class ExampleList(Record, frozen=True):
    """`partc examples`."""

    examples: tuple[ExampleEntry, ...]


class ExamplesCopied(Record, frozen=True):
    """`partc examples copy`: the files that were written."""

    files: tuple[str, ...]
