"""Tell how a strategy configures every operator group, as far as configurations can say it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from partc.cost.strategy import Strategy
from partc.passes.analysis import Analysis
from partc.passes.distribute import configuration_of, lay_out
from partc.passes.layouts.configuration import data_parallel
from partc.passes.layouts.decide_layouts import AxisDecision, Decision
from partc.passes.layouts.layouts import Mesh, Split
from partc.passes.layouts.strategy_meshes import BATCH
from partc.passes.search.find_groups import OperatorGroup, spell_dimension
from partc.passes.search.operator_space import OperatorConfig


def read_configs(
    analysis: Analysis, strategy: Strategy, groups: Sequence[OperatorGroup]
) -> tuple[OperatorConfig, ...]:
    """Return the configuration of each group: what its operator divides, on which workers.

    Of workers that do the same, one does it. Raises InputError where the strategy cannot be laid out.
    """
    graph = lay_out(analysis, strategy.parameters, configuration_of(analysis, strategy))
    alone = lay_out(analysis, {}, data_parallel(2))
    configs: list[OperatorConfig] = []
    for group in groups:
        decision = graph.decisions[group.node]
        samples = _dimension(alone.decisions[group.node].axes[0])
        configs.append(_config_of(graph.meshes.of(decision.site), decision, samples))
    return tuple(configs)


@dataclass(frozen=True, slots=True)
class _Divided:
    axis: int
    dimension: str
    parts: int


def _config_of(mesh: Mesh, decision: Decision, samples: str | None) -> OperatorConfig:
    sizes = [size for _, size in mesh.grid]
    divided = [
        _Divided(axis, BATCH if dimension == samples else dimension, sizes[axis])
        for axis, along in enumerate(decision.axes[: len(sizes)])
        if sizes[axis] > 1 and (dimension := _dimension(along)) is not None
    ]
    grid = np.array(mesh.workers).reshape(sizes)
    for axis in range(len(sizes)):
        if all(each.axis != axis for each in divided):
            grid = grid.take([0], axis=axis)
    split: dict[str, int] = {}
    for each in divided:
        split[each.dimension] = split.get(each.dimension, 1) * each.parts
    return OperatorConfig(tuple(split.items()) or (("batch", 1),), tuple(grid.ravel().tolist()))


def _dimension(along: AxisDecision) -> str | None:
    """Return the dimension that a mesh axis divides, as strategies spell it."""
    for operand, placement in ((None, along.outputs[0]), *enumerate(along.inputs)):
        if isinstance(placement, Split):
            return spell_dimension(placement, operand)
    return None
