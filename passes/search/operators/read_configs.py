"""Tell how a strategy configures operator groups: what each divides, and who computes each part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod

import numpy as np

from partc.cost.strategy import Strategy
from partc.passes.analysis import Analysis
from partc.passes.distribute import lay_out, lay_out_strategy
from partc.passes.layouts.configuration import data_parallel
from partc.passes.layouts.decisions import AxisDecision, Decision
from partc.passes.layouts.layouts import PerReplica, Split
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.layouts.strategy_meshes import BATCH
from partc.passes.search.operators.find_groups import OperatorGroup, spell_dimension
from partc.passes.search.operators.operator_space import OperatorConfig, SplitDegrees


@dataclass(frozen=True, slots=True)
class OperatorGrid:
    """What an operator divides, and the workers that compute each part, by number.

    split: dimension -> parts, samples first where it divides them. workers: of each part, the last
    dimension's neighbours together; several where they do the same. has_samples: data parallelism divides it.
    """

    split: SplitDegrees
    workers: tuple[tuple[int, ...], ...]
    has_samples: bool = field(default=True, compare=False)

    @property
    def config(self) -> OperatorConfig:
        """Return the configuration in which one worker computes each part.

        What has no samples, such as the product of a first state of zeros, all have who are its devices: data
        parallelism does not divide it either.
        """
        if self.has_samples:
            return OperatorConfig(self.split, tuple(together[0] for together in self.workers))
        split = dict(self.split) | {BATCH: len(self.workers[0])}
        ordered = sorted(split.items(), key=lambda item: item[0] != BATCH)
        return OperatorConfig(tuple(ordered), tuple(chain(*zip(*self.workers, strict=True))))


def read_configs(
    analysis: Analysis, strategy: Strategy, groups: Sequence[OperatorGroup]
) -> tuple[OperatorConfig, ...]:
    """Return the configuration of each group under a strategy; of workers that do the same, one does it.

    Raises InputError where the strategy cannot be laid out.
    """
    graph = lay_out_strategy(analysis, strategy)
    return tuple(grid.config for grid in read_grids(analysis, graph.decisions, graph.meshes, groups))


def read_grids(
    analysis: Analysis, decisions: Mapping[str, Decision], meshes: Meshes, groups: Sequence[OperatorGroup]
) -> tuple[OperatorGrid, ...]:
    """Return who computes what of each group's operator, which runs as decided."""
    alone = lay_out(analysis, {}, data_parallel(1)).decisions
    grids: list[OperatorGrid] = []
    for group in groups:
        decision, samples = decisions[group.node], _dimension(alone[group.node].axes[0])
        grids.append(_grid_of(meshes.of(decision.site), decision, samples))
    return tuple(grids)


def _grid_of(mesh: Mesh, decision: Decision, samples: str | None) -> OperatorGrid:
    sizes = [size for _, size in mesh.grid]
    axes_of: dict[str, list[int]] = {}  # dimension -> the mesh axes that divide it, in their order
    for axis, along in enumerate(decision.axes[: len(sizes)]):
        dimension = _dimension(along)
        if sizes[axis] > 1 and dimension is not None:
            axes_of.setdefault(BATCH if dimension == samples else dimension, []).append(axis)
    ordered = sorted(axes_of.items(), key=lambda item: item[0] != BATCH)
    dividing = [axis for _, axes in ordered for axis in axes]
    repeating = [axis for axis in range(len(sizes)) if axis not in dividing]
    grid = np.array(mesh.workers).reshape(sizes).transpose([*dividing, *repeating])
    together = grid.reshape(-1, prod(sizes[axis] for axis in repeating)).tolist()
    split = tuple((dimension, prod(sizes[axis] for axis in axes)) for dimension, axes in ordered)
    return OperatorGrid(split or ((BATCH, 1),), tuple(map(tuple, together)), samples is not None)


def _dimension(along: AxisDecision) -> str | None:
    """Return the dimension that a mesh axis divides, as strategies spell it."""
    for operand, placement in ((None, along.outputs[0]), *enumerate(along.inputs)):
        if isinstance(placement, Split):
            return spell_dimension(placement, operand)
        if isinstance(placement, PerReplica):
            return BATCH
    return None
