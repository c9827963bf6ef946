"""What a strategy asks of the workers' mesh: where variables live, and which dimensions ops split."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from partc.passes.layouts.layouts import Layout, Mesh, Split


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
