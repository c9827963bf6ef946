"""Where a tensor's pieces are: a site, and how its ranks divide the tensor among themselves.

Replicate        every rank has the whole
Split            rank r of N has the r-th N-th of one factor of one axis
Partial          every rank has a term; the tensor is their sum (or maximum, or minimum)
PerReplica       every rank has a tensor of its own: replicas on different data, not pieces
Owned            servers: each has some rows of axis 0 (or the slices whose ids fall in its rows)
Gathered         workers: everyone has all that servers own, one server's behind the other's
RequestedRows    servers: each has the rows that workers' ids request of it, on their way to these
"""

from dataclasses import dataclass
from typing import Literal

from partc.runtime.plan.program import Site

Reduction = Literal["sum", "max", "min"]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the site has the whole tensor."""


@dataclass(frozen=True, slots=True)
class Split:
    """Rank r of N has the r-th N-th of a factor of `axis`.

    The axis, of size outer x factor x inner, is cut along its middle: [T, B, H] reshaped to
    [T * B, H] and split on B is Split(axis=0, outer=T).
    """

    axis: int
    outer: int = 1


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank has a term of the tensor."""

    reduction: Reduction = "sum"


@dataclass(frozen=True, slots=True)
class PerReplica:
    """Every replica has its own tensor, computed from its own data."""


@dataclass(frozen=True, slots=True)
class Owned:
    """Every server has the part of axis 0 that belongs to its rows of `parameter`."""

    parameter: str


@dataclass(frozen=True, slots=True)
class Gathered:
    """Every worker has what all servers own of `parameter`, and each server's part can be told."""

    parameter: str


@dataclass(frozen=True, slots=True)
class RequestedRows:
    """Every server has, on axis 0, the rows of `parameter` that one Gather's ids request of it.

    The ids' axes, `ids_rank` of them, are one here. `returned`: where the tensor's pieces are once
    the rows are back on the workers.
    """

    parameter: str
    gather: str
    ids_rank: int
    returned: "Replicate | Split | PerReplica"


Placement = Replicate | Split | Partial | PerReplica | Owned | Gathered | RequestedRows


@dataclass(frozen=True, slots=True)
class Layout:
    """A placement over the ranks of one site."""

    site: Site
    placement: Placement


WHOLE = Layout("worker", Replicate())
REPLICATE = Replicate()
