"""Spread every trained variable over the replicas: parameters, gradients and slots in parts.

Each is gathered where the main computation reads it, and its gradient scattered to where it is kept (Zhao et
al. 2023, PyTorch FSDP; Rajbhandari et al. 2020, ZeRO stage 3).
"""

from collections.abc import Mapping

from partc.passes.analysis import Analysis
from partc.passes.layouts.layouts import REPLICAS, Layout, Mesh, Split


def shard_variables(analysis: Analysis, mesh: Mesh, homes: Mapping[str, Layout]) -> dict[str, Split]:
    """Return where each trained variable is split along the replicas' axis: its first axis that divides."""
    found: dict[str, Split] = {}
    for name in analysis.training.gradients:
        shape = analysis.training.variables[name].shape
        home = homes.get(name, Layout("worker"))
        for axis in range(len(shape)):
            split = Split(axis)
            if mesh.divides(home.with_along(REPLICAS, split), shape):
                found[name] = split
                break
    return found
