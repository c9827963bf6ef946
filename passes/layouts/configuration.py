"""What a strategy asks of the workers' mesh: where variables live, and which dimensions ops split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from partc.passes.layouts.layouts import Layout, Mesh, Replicate, Split


@dataclass(frozen=True, slots=True)
class Wish:
    """A dimension that an op is to split: of its output, or of an operand where the output lacks it.

    `operand` None: of output 0. `split` None: nothing is split.
    """

    split: Split | None
    operand: int | None = None


@dataclass(frozen=True)
class Configuration:
    """The workers' mesh, and what is asked of it.

    homes   variable -> where it is kept and updated, if not whole on every worker
    wishes  node -> mesh axis -> the dimension that it splits there
    """

    mesh: Mesh
    homes: Mapping[str, Layout] = field(default_factory=dict)
    wishes: Mapping[str, Mapping[int, Wish]] = field(default_factory=dict)


def data_parallel(replicas: int) -> Configuration:
    """Return the configuration under which every worker is a replica."""
    return Configuration(Mesh("worker", (("data", replicas),)))


def home_of_follower(home: Layout, parameter: Sequence[int], follower: Sequence[int]) -> Layout:
    """Return where what follows a parameter of a home is kept: whole along axes that one of them lacks.

    `parameter`, `follower`: their shapes, such as [256, 64] and the means of its rows, [256, 1].
    """
    kept = Layout(home.site)
    for axis, split in home.splits():
        has = len(parameter) == len(follower) and parameter[split.axis] == follower[split.axis]
        kept = kept.with_along(axis, split if has else Replicate())
    return kept
