"""What a cluster is made of: hosts with their devices, and the links between them."""

from math import ceil, inf
from typing import Annotated, Literal

import msgspec

from partc.cost.cluster.profiles import HOST_MEMORY_BYTES_PER_S
from partc.runtime.plan.record import Record

PLACE_NOISE = 0.05  # by which a measured number of cores may be too high


class Device(Record, frozen=True):
    """A CPU share or a GPU that computes one replica.

    `profile` names an entry of profiles.py. `flops_per_s`: sustained float32 rate of products, of one thread
    for a CPU; None: the profile's.
    """

    name: str
    kind: Literal["cpu", "gpu"]
    profile: str
    threads: int = 1
    index: int = 0  # GPU ordinal on its host
    memory_bytes: int | None = None  # None: the profile's for a GPU, an equal part of the host's for a CPU
    flops_per_s: Annotated[float, msgspec.Meta(gt=0)] | None = None

    @property
    def rates(self) -> tuple[str, float | None]:
        """Return what devices that compute alike have in common, besides threads."""
        return self.profile, self.flops_per_s


class Host(Record, frozen=True):
    """A machine. With `server` false it owns no variables; it still sums what its workers send.

    `cores` of its CPU, each as quick as for a thread that is alone: a part of one where hosts share a machine
    or a quota holds ranks back, fewer than there are where cores share their units. None: as many as its
    ranks have threads. `environment`: what its ranks' environment has besides; `python`: the interpreter that
    runs them, empty for the one that `partc run` runs in.
    """

    name: str
    devices: tuple[Device, ...]
    memory_bytes: int
    address: str = "localhost"
    server: bool = True
    memory_bytes_per_s: float = HOST_MEMORY_BYTES_PER_S
    cores: Annotated[float, msgspec.Meta(gt=0)] | None = None
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    python: str = ""

    @property
    def places(self) -> float:
        """Return how many threads can run at once: a slow core, or one with a quota, still is a place."""
        return inf if self.cores is None else max(1, ceil(self.cores - PLACE_NOISE))


class Link(Record, frozen=True):
    """A full-duplex connection: `bytes_per_s` in each direction, sustained."""

    ends: tuple[str, str]
    bytes_per_s: float
    latency_s: float = 0.0
