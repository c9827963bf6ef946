"""Spread every trained variable over the replicas: parameters, gradients and slots in parts.

Each is gathered where the main computation reads it, and its gradient scattered to where it is kept (Zhao et
al. 2023, PyTorch FSDP; Rajbhandari et al. 2020, ZeRO stage 3).
"""

from collections.abc import Mapping

from partc.passes.analysis import Analysis
from partc.passes.layouts.layouts import REPLICAS, Layout, Mesh, Split


def shard_variables(analysis: Analysis, mesh: Mesh, homes: Mapping[str, Layout]) -> dict[str, Split]:
    """Return where each trained variable is split along the replicas' axis: its first axis that divides.

    Of one that has none, the first axis that makes parts at all, of which earlier ones have one entry more.
    """
    found: dict[str, Split] = {}
    for name in analysis.training.gradients:
        shape = analysis.training.variables[name].shape
        home = homes.get(name, Layout("worker"))
        equal = [Split(axis) for axis in range(len(shape))]
        uneven = [mesh.cut(REPLICAS, axis, 1, size) for axis, size in enumerate(shape)]
        for split in (*equal, *uneven):
            if mesh.divides(home.with_along(REPLICAS, split), shape):
                found[name] = split
                break
    return found
