"""What a rank holds from step to step: variables, and buffers for communication."""

from collections.abc import Collection
from math import prod

import numpy as np

from partc.runtime.plan.boxes import local_shape
from partc.runtime.plan.program import Plan, Rank, Site
from partc.runtime.plan.variables import PlanVariable, VariablePiece


def piece_bytes(piece: VariablePiece, variable: PlanVariable) -> int:
    """Return the size of a variable, or of the part of it that a rank holds."""
    return prod(local_shape(variable.shape, piece.box)) * np.dtype(variable.dtype).itemsize


def variables_bytes(plan: Plan, rank: Rank) -> int:
    """Return the size of the variables that a rank holds outside of buffers."""
    variables = {variable.name: variable for variable in plan.variables}
    in_buffers = {piece.value for piece in (*plan.slices, *rank.slices)}
    return sum(piece_bytes(p, variables[p.variable]) for p in rank.pieces if p.value not in in_buffers)


def buffers_bytes(plan: Plan, sites: Collection[Site]) -> int:
    """Return the size of all memory that ranks of these sites have for communication."""
    own = (
        buffer for buffer in plan.buffers if buffer.memory is None and not set(sites).isdisjoint(buffer.sites)
    )
    return sum(buffer.elements * np.dtype(buffer.dtype).itemsize for buffer in own)


def stored_bytes(plan: Plan) -> int:
    """Return the size of all variables, each once: what a checkpoint takes."""
    return sum(prod(variable.shape) * np.dtype(variable.dtype).itemsize for variable in plan.variables)
