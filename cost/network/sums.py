"""Sums along lines of workers: flat, which is one communication of all, or level by level, which is three.

    flat     all_reduce       of the line
    levels   reduce           of its members on each host, at the first of them
             all_reduce       of these
             broadcast        of its members on each host, all begun at once: nobody waits between

A short sum is flat: MPI takes its levels within the one collective. A long one crosses a host's link for each
member on the host if it is flat, and once by levels. Lines that lie otherwise on hosts, such as those along
`data` of `data=3,tensor=2` on two hosts of three, are flat: by levels they would add in other orders, and
copies of what several lines sum would differ in their last bits.
"""

from collections.abc import Sequence
from dataclasses import replace

from partc.cost.cluster.profiles import PER_COMMUNICATION_S
from partc.cost.network.collectives import (
    AllReduce,
    all_reduce,
    all_reduce_by_levels,
    has_levels,
    rounded_all_reduce,
)
from partc.cost.network.families import Family, in_every, known_families
from partc.cost.network.topology import Network, remembered
from partc.cost.network.traffic import Phases, seconds_of
from partc.runtime.plan.members import are_spread_alike

Lines = tuple[tuple[str, ...], ...]  # the ends that sum together, of each group


def goes_by_levels(network: Network, lines: Lines, message_bytes: float, is_rounded: bool = False) -> bool:
    """Tell whether sums along all lines, at the same time, are made level by level, or flat.

    `is_rounded`: float32 of which 16 bits are sent, but within hosts where that is a level.
    """
    return (
        any(has_levels(network, line) for line in lines)
        and are_spread_alike(network.hosts_of(line) for line in lines)
        and is_sooner_by_levels(network, lines, message_bytes, is_rounded)
    )


@remembered
def is_sooner_by_levels(network: Network, lines: Lines, message_bytes: float, is_rounded: bool) -> bool:
    """Tell whether sums along all lines, at the same time, take less level by level than flat."""
    families, way = known_families(network, lines), rounded_all_reduce if is_rounded else all_reduce
    by_levels, flat = (_along(network, families, message_bytes, way, level) for level in (True, False))
    return seconds_of(network, by_levels) < seconds_of(network, flat)


def all_reduce_along(network: Network, lines: Lines, message_bytes: float) -> Phases:
    """Sum along all lines at the same time, in the way that is chosen."""
    by_levels = goes_by_levels(network, lines, message_bytes)
    return _along(network, known_families(network, lines), message_bytes, all_reduce, by_levels)


def all_reduce_of(
    network: Network, line: Sequence[str], message_bytes: float, way: AllReduce, by_levels: bool
) -> Phases:
    """Sum among the members of a line in some way, or by levels of which the middle one is in this way.

    By levels, the latency holds what two communications more take to be begun.
    """
    if not by_levels:
        return way(network, line, message_bytes)
    first, *rest = all_reduce_by_levels(network, line, message_bytes, way)
    return replace(first, latency_s=first.latency_s + 2 * PER_COMMUNICATION_S), *rest


def _along(
    network: Network, families: Sequence[Family], message_bytes: float, way: AllReduce, by_levels: bool
) -> Phases:
    return in_every(
        network, families, lambda line: all_reduce_of(network, line, message_bytes, way, by_levels)
    )
