"""Write a named strategy out: an ordinary strategy, as a file could say it."""

from partc.cost.named_strategy import NamedStrategy
from partc.cost.strategy import MESH_STRATEGY_FORMAT, AxisSplit, Batch, Strategy
from partc.passes.analysis import Analysis
from partc.passes.layouts.layouts import REPLICAS, Layout, Mesh
from partc.passes.search.shard_variables import shard_variables
from partc.passes.search.tensor_parallel import split_weights


def name_strategy(analysis: Analysis, named: NamedStrategy, workers: int, batch: Batch) -> Strategy:
    """Return what a name means for a step. Raises BadUsage where the workers make no such grid."""
    sizes = named.mesh(workers)
    mesh = Mesh("worker", tuple(sizes.items()))
    homes: dict[str, Layout] = {}
    for axis, (name, size) in enumerate(mesh.axes):
        if name == "tensor" and size > 1:
            for variable, split in split_weights(analysis, mesh, axis).items():
                homes[variable] = homes.get(variable, Layout("worker")).with_along(axis, split)
    if named.shards_variables:
        for variable, split in shard_variables(analysis, mesh, homes).items():
            homes[variable] = homes.get(variable, Layout("worker")).with_along(REPLICAS, split)
    variables = {
        variable: {mesh.axes[axis][0]: AxisSplit(split.axis, split.outer) for axis, split in home.splits()}
        for variable, home in homes.items()
    }
    return Strategy(MESH_STRATEGY_FORMAT, batch, {}, mesh=sizes, variables=variables)
