"""How many rows of a table are on their way at each level, for the cost model.

worker   distinct rows that one worker asks for, or pushes
host     rows that a host's server asks for, or pushes, for all its workers
owned    rows that one owner ends up with, of all replicas
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from partc.cost.cluster.cluster import Cluster
from partc.cost.network.two_level import distinct_rows, owner_hosts
from partc.cost.strategy import Strategy, SyncFacts

Level = Literal["worker", "host", "owned"]


@dataclass(frozen=True, slots=True)
class ExpectedRows:
    """Rows of one parameter, expected in a step."""

    worker: float
    host: float
    owned: float

    def at(self, level: Level) -> float:
        """Return the rows at a level."""
        return {"worker": self.worker, "host": self.host, "owned": self.owned}[level]


def expect_rows(
    facts: tuple[SyncFacts, ...], strategy: Strategy, cluster: Cluster
) -> dict[str, ExpectedRows]:
    """Return what the strategy makes of each sparse parameter's touched rows."""
    workers = [len(host.devices) for host in cluster.hosts]
    owners = max(1, len(owner_hosts(cluster)))
    return {
        fact.name: ExpectedRows(
            fact.touched_rows,
            distinct_rows(fact, max(workers))
            if strategy.parameters[fact.name].local_aggregation
            else fact.touched_rows * max(workers),
            distinct_rows(fact, sum(workers)) / owners,
        )
        for fact in facts
        if fact.sparse
    }


def rows_at(expected: Mapping[str, ExpectedRows], parameter: str, level: Level, drawn: float) -> float:
    """Return the rows at a level; where nothing is known, all of a worker's ids are distinct.

    `drawn`: ids of one worker.
    """
    return expected[parameter].at(level) if parameter in expected else drawn
