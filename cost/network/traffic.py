"""What communications put on a network: bytes by lane, by end and by host.

MessageTraffic     along ways that are known one by one: rings, chains, trees
AllToAllTraffic    everybody sends to everybody: member i sends sent[i] * taken[j] bytes to member j
MemoryTraffic      of ends, such as that of adding what arrived to what is there
FamilyTraffic      the same in many groups that are alike, computed for the first of them (families.py)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from partc.cost.network.topology import Hops, Network
from partc.cost.network.ways import Array, Numbers


@dataclass(slots=True)
class Totals:
    """Bytes that add up: `lanes` float64[lanes]; `sent`, `received` float64[nodes]; `ingress`, `egress`
    float64[hosts], which count what crosses a host's border.
    """

    lanes: Array
    sent: Array
    received: Array
    ingress: Array
    egress: Array

    @classmethod
    def nothing(cls, network: Network) -> "Totals":
        """Return zeros."""
        ends, hosts = len(network.nodes), len(network.hosts)
        return cls(np.zeros(len(network.lanes)), *map(np.zeros, (ends, ends, hosts, hosts)))


class Flows(Protocol):
    """Something that moves bytes."""

    def load(self, network: Network, lanes: Array) -> None:
        """Add what each lane carries."""

    def count(self, network: Network, totals: Totals) -> None:
        """Add what each end and each host sends and receives."""


@dataclass(frozen=True, slots=True, eq=False)
class MessageTraffic:
    """Bytes, float64[messages], along their ways."""

    hops: Hops
    bytes: Array

    def load(self, network: Network, lanes: Array) -> None:
        """Add what each lane carries."""
        np.add.at(lanes, self.hops.lanes, self.bytes[self.hops.messages])

    def count(self, network: Network, totals: Totals) -> None:
        """Add what each end and each host sends and receives."""
        np.add.at(totals.sent, self.hops.sources, self.bytes)
        np.add.at(totals.received, self.hops.targets, self.bytes)
        sources, targets = network.host_of[self.hops.sources], network.host_of[self.hops.targets]
        away = sources != targets
        np.add.at(totals.egress, sources[away], self.bytes[away])
        np.add.at(totals.ingress, targets[away], self.bytes[away])


@dataclass(frozen=True, slots=True, eq=False)
class AllToAllTraffic:
    """`sent`, `taken`: float64[members], of which products are bytes; a member sends nothing to itself."""

    members: Numbers  # nodes
    sent: Array
    taken: Array

    def load(self, network: Network, lanes: Array) -> None:
        """Add what each lane carries."""
        sent, taken = np.zeros(len(network.nodes)), np.zeros(len(network.nodes))
        sent[self.members], taken[self.members] = self.sent, self.taken
        lanes += network.exchange_loads(sent, taken)

    def count(self, network: Network, totals: Totals) -> None:
        """Add what each end and each host sends and receives."""
        sent, taken = self.sent.sum(), self.taken.sum()
        totals.sent[self.members] += self.sent * (taken - self.taken)
        totals.received[self.members] += self.taken * (sent - self.sent)
        hosts = network.host_of[self.members]
        of_sent, of_taken = (
            np.bincount(hosts, values, len(network.hosts)) for values in (self.sent, self.taken)
        )
        totals.egress += of_sent * (taken - of_taken)
        totals.ingress += of_taken * (sent - of_sent)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTraffic:
    """Bytes of memory traffic, float64[ends]. Work on a GPU's own memory loads no lane."""

    ends: Numbers  # nodes
    bytes: Array

    def load(self, network: Network, lanes: Array) -> None:
        """Add what each host's memory carries."""
        on_hosts = ~network.is_gpu[self.ends]
        np.add.at(lanes, network.memory_lane[self.ends[on_hosts]], self.bytes[on_hosts])

    def count(self, network: Network, totals: Totals) -> None:
        """Nothing is sent."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Flows that run together, and the latency of messages in sequence."""

    flows: tuple[Flows, ...]
    latency_s: float


Phases = tuple[Phase, ...]


def lane_loads(network: Network, phases: Iterable[Phase]) -> Array:
    """Return what each lane carries over all phases, float64[lanes]."""
    lanes = np.zeros(len(network.lanes))
    for phase in phases:
        for flows in phase.flows:
            flows.load(network, lanes)
    return lanes


def seconds_of(network: Network, phases: Iterable[Phase]) -> float:
    """Return how long the phases take one after the other."""
    return sum(phase.latency_s + network.busiest_s(lane_loads(network, (phase,))) for phase in phases)


def loaded_lanes(network: Network, phases: Iterable[Phase]) -> tuple[int, ...]:
    """Return the numbers of lanes in use for more than half as long as the busiest: they hold phases up."""
    seconds = lane_loads(network, phases) / network.bytes_per_s
    return tuple(np.flatnonzero(seconds > seconds.max() / 2).tolist())


def totals_of(network: Network, phases: Iterable[Phase]) -> Totals:
    """Return all that the phases move."""
    totals = Totals.nothing(network)
    for phase in phases:
        for flows in phase.flows:
            flows.load(network, totals.lanes)
            flows.count(network, totals)
    return totals


def host_traffic(network: Network, phases: Iterable[Phase]) -> dict[str, tuple[float, float]]:
    """Return each host's (ingress, egress) bytes: what crosses its border, servers' included."""
    totals = totals_of(network, phases)
    borders = zip(totals.ingress.tolist(), totals.egress.tolist(), strict=True)
    return dict(zip(network.hosts, borders, strict=True))


def numbers_of(network: Network, members: Sequence[str]) -> Numbers:
    """Return the nodes of ends, int64[members]."""
    return np.array([network.number_of[name] for name in members], np.int64)
