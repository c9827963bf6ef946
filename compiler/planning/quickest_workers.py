"""Which workers few of them would be: whole hosts together, those with the quickest device first.

A device is as quick as it does the step's nodes one after the other, each at its roofline, and its updates.
Of equal ones the cluster's order counts, which is what there is where all devices are alike.
"""

from collections.abc import Sequence

from partc.compiler.planning.stage_prices import StagePrices
from partc.passes.analysis import Analysis
from partc.passes.search.stages.cut_stages import stage_line


def quickest_first(analysis: Analysis, prices: StagePrices) -> tuple[int, ...]:
    """Return the workers' numbers in that order."""
    kinds = prices.kinds
    if len(set(kinds)) == 1:
        return tuple(range(len(kinds)))
    work = stage_line(analysis).work
    seconds_of = {kind: sum(work.times(prices.node_s_on(kinds.index(kind))).both) for kind in set(kinds)}
    return _whole_hosts([seconds_of[kind] for kind in kinds], prices.hosts)


def _whole_hosts(seconds: Sequence[float], hosts: Sequence[str]) -> tuple[int, ...]:
    least = {host: min(s for s, at in zip(seconds, hosts, strict=True) if at == host) for host in hosts}
    place = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    numbers = range(len(hosts))
    return tuple(sorted(numbers, key=lambda n: (least[hosts[n]], place[hosts[n]], seconds[n], n)))
