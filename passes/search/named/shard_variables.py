"""Spread every trained variable over the replicas: parameters, gradients and slots in parts.

Each is gathered where the main computation reads it, and its gradient scattered to where it is kept (Zhao et
al. 2023, PyTorch FSDP; Rajbhandari et al. 2020, ZeRO stage 3).
"""

from collections.abc import Mapping

from partc.passes.analysis import Analysis
from partc.passes.layouts.layouts import REPLICAS, Layout, Split
from partc.passes.layouts.meshes import Mesh


def shard_variables(analysis: Analysis, mesh: Mesh, homes: Mapping[str, Layout]) -> dict[str, Split]:
    """Return where each trained variable is split along the replicas' axis: its first axis that divides.

    Of one that has none, the first axis that makes parts at all, of which earlier ones have one entry more,
    where no other mesh axis cuts it: a variable of one such axis is small, and its parts would go one by one.
    """
    splits: dict[str, Split] = {}
    for name in analysis.training.gradients:
        shape = analysis.training.variables[name].shape
        home = homes.get(name, Layout("worker"))
        places = [Split(axis) for axis in range(len(shape))]
        tried = [(place, mesh.nest_splits(home.with_along(REPLICAS, place), shape)) for place in places]
        fitting = [(place, layout) for place, layout in tried if mesh.divides(layout, shape)]
        equal = [place for place, layout in fitting if layout.uneven() == home.uneven()]
        alone = [place for place, layout in fitting if (REPLICAS,) in (f.mesh_axes for f in layout.uneven())]
        if equal or alone:
            splits[name] = (*equal, *alone)[0]
    return splits
