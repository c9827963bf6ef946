"""How the tensor that one device computes from the whole batch follows from the replicas' tensors.

    N replicas compute T_1 ... T_N, one device computes T from their batches joined:

    alike        all T_r are equal, and        T = T_1 / N^power
    beside       samples lie on an axis, and   T = the T_r side by side / N^power
    sum          samples were summed, and      T = (T_1 + ... + T_N) / N^power
    max, min     T is the largest, the smallest of the T_r
    sizes        numbers of which some grow with the batch: a shape
    coupled      T does not follow from the T_r: `why` says which node made it so

A sum of power 1 is a mean. A tensor alike, of power k, is a sum of power k + 1 as well.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

Kind = Literal["alike", "beside", "sum", "max", "min", "sizes", "coupled"]


@dataclass(frozen=True, slots=True)
class BatchRelation:
    """How one tensor of the whole batch follows from the replicas'.

    `axis`, `outer`: where the samples lie, as in layouts.Split; `outer` is None where all entries along
    the axis are equal, so that the samples lie anywhere along it. `is_counted`: a size that the graph takes
    from a shape scales it, so that no constant stands for that size.
    """

    kind: Kind
    power: int = 0
    axis: int = 0
    outer: int | None = 1
    why: str = ""
    is_counted: bool = field(default=False, compare=False)

    @property
    def is_mean(self) -> bool:
        """Tell whether the mean of the replicas' tensors is the whole batch's."""
        return (self.kind == "sum" and self.power == 1) or self == ALIKE

    @property
    def is_sum(self) -> bool:
        """Tell whether the sum of the replicas' tensors is the whole batch's."""
        return (self.kind == "sum" and self.power == 0) or (self.kind == "alike" and self.power == -1)

    def with_power(self, power: int) -> "BatchRelation":
        """Return the same with another power."""
        return replace(self, power=power)


ALIKE = BatchRelation("alike")


def coupled(why: str) -> BatchRelation:
    """Return what does not follow from the replicas' tensors."""
    return BatchRelation("coupled", why=why)
