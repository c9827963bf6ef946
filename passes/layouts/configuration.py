"""What a strategy asks of the workers' mesh: where variables live, and which dimensions ops split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from partc.passes.layouts.layouts import WORKER, Layout, Replicate, Split
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.runtime.plan.program import Site


@dataclass(frozen=True, slots=True)
class Wish:
    """A dimension that an op is to split: of its output, or of an operand where the output lacks it.

    `operand` None: of output 0. `split` None: nothing is split. `at`: where a strategy's file says so, which
    is held or refused; empty where it follows from what it says.
    """

    split: Split | None
    operand: int | None = None
    at: str = field(default="", compare=False)


@dataclass(frozen=True)
class Places:
    """Node -> the mesh that runs it, variable -> the mesh that keeps it, by their numbers."""

    nodes: Mapping[str, int] = field(default_factory=dict)
    variables: Mapping[str, int] = field(default_factory=dict)


NOWHERE_ELSE = Places()


@dataclass(frozen=True)
class Configuration:
    """The workers' meshes, and what is asked of them.

    homes   variable -> where it is kept and updated, if not whole on every worker
    wishes  node -> mesh axis -> the dimension that it splits there
    places  the meshes of nodes and variables; empty where there is one
    samples node -> where it is asked in words to divide samples
    """

    meshes: Meshes
    homes: Mapping[str, Layout] = field(default_factory=dict)
    wishes: Mapping[str, Mapping[int, Wish]] = field(default_factory=dict)
    places: Places = NOWHERE_ELSE
    samples: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_one_mesh(self) -> bool:
        """Tell whether all operators have the same workers."""
        return len(self.meshes.each) == 1

    def site_of(self, node: str) -> Site:
        """Return the mesh that runs a node."""
        return self.meshes.each[self.places.nodes.get(node, 0)].name

    def keeper_of(self, variable: str) -> Site:
        """Return the mesh that keeps a variable."""
        return self.meshes.each[self.places.variables.get(variable, 0)].name


def data_parallel(replicas: int) -> Configuration:
    """Return the configuration under which every worker is a replica."""
    return Configuration(Meshes((Mesh(WORKER, (("data", replicas),)),)))


def home_of_follower(home: Layout, parameter: Sequence[int], follower: Sequence[int]) -> Layout:
    """Return where what follows a parameter of a home is kept: whole along axes that one of them lacks.

    `parameter`, `follower`: their shapes, such as [256, 64] and the means of its rows, [256, 1].
    """
    follower_home = Layout(home.site)
    for axis, split in home.splits():
        has = len(parameter) == len(follower) and parameter[split.axis] == follower[split.axis]
        follower_home = follower_home.with_along(axis, split if has else Replicate())
    return follower_home
