"""How much memory each rank needs, and how much its device has.

variables    what the rank holds, unless it lies in a buffer
buffers      contiguous memory for communication, one per site that the rank plays
activations  at most half of what its largest segment touches, for the nodes of a segment write
             each intermediate once and read it at least once. An estimate: onnxruntime frees
             what is no longer read, so it may need less.
"""

from dataclasses import dataclass
from math import prod

import numpy as np

from partc.cost.cluster.cluster import Cluster
from partc.cost.cluster.machines import Host
from partc.cost.cluster.profiles import PROFILES
from partc.runtime.errors import DoesNotFit
from partc.runtime.plan.boxes import local_shape
from partc.runtime.plan.program import Held, Plan, PlanVariable, Rank, Run


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One rank's needs and its limit."""

    rank: int
    variables_bytes: int
    buffers_bytes: int
    activations_bytes: int
    limit_bytes: int

    @property
    def certain_bytes(self) -> int:
        """Return what the rank needs whatever its runtime frees."""
        return self.variables_bytes + self.buffers_bytes

    @property
    def needed_bytes(self) -> int:
        """Return the sum of the needs."""
        return self.certain_bytes + self.activations_bytes


def memory_of(plan: Plan, cluster: Cluster) -> tuple[DeviceMemory, ...]:
    """Return the memory of every rank, in rank order."""
    hosts = {host.name: host for host in cluster.hosts}
    variables = {variable.name: variable for variable in plan.variables}
    return tuple(_rank_memory(plan, rank, hosts[rank.host], variables) for rank in plan.ranks)


def check_memory(plan: Plan, cluster: Cluster) -> tuple[DeviceMemory, ...]:
    """Return the memory of every rank. Raises DoesNotFit where variables and buffers alone exceed it.

    Activations are an estimate from above, so they are reported but refuse nothing.
    """
    memory = memory_of(plan, cluster)
    fullest = max(memory, key=lambda need: need.certain_bytes - need.limit_bytes)
    missing_bytes = fullest.certain_bytes - fullest.limit_bytes
    if missing_bytes > 0:
        rank = plan.ranks[fullest.rank]
        name, size = _largest(plan, rank)
        raise DoesNotFit(
            f"variables and buffers need {fullest.certain_bytes} bytes, the device has "
            f"{fullest.limit_bytes}; the largest variable is {name!r} with {size}",
            at=f"rank {rank.rank}, device {rank.device!r} of host {rank.host!r}",
            fix=f"raise its memory_bytes by {missing_bytes}, or let servers keep {name!r} (method "
            "`servers` in strategy.json)",
            missing_bytes=missing_bytes,
        )
    return memory


def _largest(plan: Plan, rank: Rank) -> tuple[str, int]:
    variables = {variable.name: variable for variable in plan.variables}
    sizes = {held.variable: held_bytes(held, variables[held.variable]) for held in rank.held}
    return max(sizes.items(), key=lambda item: (item[1], item[0]), default=("none", 0))


def _rank_memory(plan: Plan, rank: Rank, host: Host, variables: dict[str, PlanVariable]) -> DeviceMemory:
    in_buffers = {piece.value for piece in (*plan.slices, *rank.slices)}
    held = [held for held in rank.held if held.value not in in_buffers]
    buffers = [buffer for buffer in plan.buffers if set(buffer.sites) & set(rank.sites)]
    segments = [i for i in plan.instructions if isinstance(i, Run) and i.site in rank.sites]
    return DeviceMemory(
        rank=rank.rank,
        variables_bytes=sum(held_bytes(piece, variables[piece.variable]) for piece in held),
        buffers_bytes=sum(buffer.elements * np.dtype(buffer.dtype).itemsize for buffer in buffers),
        activations_bytes=max((run.touched_bytes for run in segments), default=0) // 2,
        limit_bytes=limit_bytes(rank, host),
    )


def held_bytes(held: Held, variable: PlanVariable) -> int:
    """Return the size of a variable, or of the part of it that a rank holds."""
    return prod(local_shape(variable.shape, held.box)) * np.dtype(variable.dtype).itemsize


def limit_bytes(rank: Rank, host: Host) -> int:
    """Return what the rank's device has: a GPU's own memory, or a CPU rank's part of its host's.

    CPU devices that name no memory_bytes share equally what the others leave.
    """
    device = next((device for device in host.devices if device.name == rank.device), None)
    if device is not None and device.memory_bytes is not None:
        return device.memory_bytes
    if device is not None and device.kind == "gpu":
        return PROFILES[device.profile].memory_bytes
    cpus = [device for device in host.devices if device.kind == "cpu"]
    claimed = sum(cpu.memory_bytes or 0 for cpu in cpus)
    sharing = sum(cpu.memory_bytes is None for cpu in cpus)
    return (host.memory_bytes - claimed) // max(1, sharing)
