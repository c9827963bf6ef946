"""How much memory each rank needs, and how much its device has.

variables    what the rank holds, unless it lies in a buffer; slots are those of them that are no parameters:
             optimizer slots, averages, counters
buffers      contiguous memory for communication, one per site that the rank plays
values       the most that it keeps between segments: data, and what of each micro-batch under way is
             read later (live_memory.py)
activations  what its segments make besides, at the moment when that is most. An estimate: what the pieces
             that onnxruntime's arena is in leave unused is not in it
process      what a CPU rank's process takes besides (process_memory.py)
"""

from dataclasses import dataclass

from partc.cost.cluster.cluster import Cluster, ClusterRank
from partc.cost.cluster.machines import Host
from partc.cost.cluster.profiles import PROFILES
from partc.cost.simulation.live_memory import LiveBytes, live_bytes, live_kind
from partc.cost.simulation.process_memory import process_bytes
from partc.runtime.errors import DoesNotFit
from partc.runtime.plan.held_memory import buffers_bytes, piece_bytes
from partc.runtime.plan.program import Plan, Rank


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One rank's needs and its limit."""

    rank: int
    variables_bytes: int
    slots_bytes: int  # of these
    buffers_bytes: int
    values_bytes: int
    activations_bytes: int
    process_bytes: int
    limit_bytes: int

    @property
    def certain_bytes(self) -> int:
        """Return what the rank needs whatever its runtime frees."""
        return self.variables_bytes + self.buffers_bytes + self.values_bytes

    @property
    def needed_bytes(self) -> int:
        """Return the sum of the needs."""
        return self.certain_bytes + self.activations_bytes + self.process_bytes


def memory_of(plan: Plan, cluster: Cluster) -> tuple[DeviceMemory, ...]:
    """Return the memory of every rank, in rank order."""
    hosts = {host.name: host for host in cluster.hosts}
    variables = {variable.name: variable for variable in plan.variables}
    in_buffers = {piece.value for piece in plan.slices}
    buffers = {sites: buffers_bytes(plan, sites) for sites in {rank.sites for rank in plan.ranks}}
    live: dict[object, tuple[LiveBytes, int]] = {}
    needs: list[DeviceMemory] = []
    for rank in plan.ranks:
        kind = live_kind(plan, rank)
        if kind not in live:  # ranks of one kind do the same
            live[kind] = live_bytes(plan, rank), process_bytes(plan, rank)
        values, process = live[kind]
        own = in_buffers if not rank.slices else in_buffers | {piece.value for piece in rank.slices}
        pieces = [(variables[piece.variable], piece) for piece in rank.pieces if piece.value not in own]
        sizes = [(variable.role, piece_bytes(piece, variable)) for variable, piece in pieces]
        need = DeviceMemory(
            rank=rank.rank,
            variables_bytes=sum(nbytes for _, nbytes in sizes),
            slots_bytes=sum(nbytes for role, nbytes in sizes if role != "parameter"),
            buffers_bytes=buffers[rank.sites],
            values_bytes=values.between_runs,
            activations_bytes=values.peak - values.between_runs,
            process_bytes=process,
            limit_bytes=limit_bytes(rank, hosts[rank.host]),
        )
        needs.append(need)
    return tuple(needs)


def check_memory(plan: Plan, cluster: Cluster) -> tuple[DeviceMemory, ...]:
    """Return the memory of every rank. Raises DoesNotFit where it is less than is certain.

    Activations are an estimate, and a process shares what it takes with others, so they refuse nothing:
    whoever compiles is told where they are more than the device has.
    """
    memory = memory_of(plan, cluster)
    fullest = max(memory, key=lambda need: need.certain_bytes - need.limit_bytes)
    missing_bytes = fullest.certain_bytes - fullest.limit_bytes
    if missing_bytes > 0:
        rank = plan.ranks[fullest.rank]
        name, size = _largest(plan, rank)
        raise DoesNotFit(
            f"variables, buffers and what is kept between segments need {fullest.certain_bytes} bytes, "
            f"the device has {fullest.limit_bytes}; the largest variable is {name!r} with {size}",
            at=f"rank {rank.rank}, device {rank.device!r} of host {rank.host!r}",
            fix=f"raise its memory_bytes by {missing_bytes}, or let servers keep {name!r} (method "
            "`servers` in strategy.json)",
            missing_bytes=missing_bytes,
        )
    return memory


def _largest(plan: Plan, rank: Rank) -> tuple[str, int]:
    variables = {variable.name: variable for variable in plan.variables}
    sizes = {piece.variable: piece_bytes(piece, variables[piece.variable]) for piece in rank.pieces}
    return max(sizes.items(), key=lambda item: (item[1], item[0]), default=("none", 0))


def limit_bytes(rank: Rank | ClusterRank, host: Host) -> int:
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
