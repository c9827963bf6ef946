"""The variables' first values, made by their owners, only the parts that they own."""

from collections.abc import Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

from partc.runtime.data.checkpoint import map_array
from partc.runtime.data.draws import normal_rows, uniform_rows
from partc.runtime.errors import BadData, BadPlan, some_of
from partc.runtime.execution.device import UNSOUND, WRONG_OF_VECTORS
from partc.runtime.plan.boxes import (
    columns_of,
    contiguous_rows,
    find_rows,
    is_whole,
    local_shape,
    take,
    with_rows,
)
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.variables import Box, Constant, Initial, Made, Normal, PlanVariable, Stored, Uniform

Array = np.ndarray[Any, np.dtype[Any]]

BLOCK_BYTES = 1 << 22  # of rows that are drawn whole, where only columns of them are kept


class FirstValues(Protocol):
    """What variables begin with."""

    def part(self, name: str, box: Box | None = None) -> Array:
        """Return a fresh local tensor of a part of variable `name`, in C order."""


class InitialValues:
    """First values by variable and box, from the plan or from `given` whole tensors."""

    def __init__(self, folder: PlanFolder, overrides: Mapping[str, Array] | None = None) -> None:
        self._folder = folder.path
        self._variables = {variable.name: variable for variable in folder.plan.variables}
        self._given = dict(overrides or {})
        self._make = cache(_make_whole)
        for name, array in self._given.items():
            _check_given(name, array, self._variables)

    def part(self, name: str, box: Box | None = None) -> Array:
        """Return a fresh local tensor of a part of variable `name`, in C order."""
        variable = self._variables[name]
        if name in self._given:
            return take(self._given[name], box)
        match variable.initial:
            case Stored(file=file, key=key):
                return take(_checked(variable, map_array(self._folder / file, key)), box)
            case Made(file=file, output=output):
                return take(_checked(variable, self._make(self._folder / file, output)), box)
            case formula:
                return _formula_part(formula, variable, box)


def _formula_part(formula: Initial, variable: PlanVariable, box: Box | None) -> Array:
    """Make a part, and no more than a block of whole rows beside it."""
    dtype = np.dtype(variable.dtype)
    result_shape = local_shape(variable.shape, box)
    if isinstance(formula, Constant):
        return np.full(result_shape, formula.value, dtype)
    shape = variable.shape or (1,)
    rows = (0, shape[0]) if is_whole(box) else contiguous_rows(box)
    if rows is not None:
        return _formula_rows(formula, shape, *rows, dtype).reshape(result_shape)
    assert box is not None, "a part is left out"
    result = np.empty(result_shape, dtype)
    block = max(1, BLOCK_BYTES // max(1, prod(shape[1:]) * dtype.itemsize))
    for first in range(0, shape[0] if result.size else 0, block):
        stop = min(first + block, shape[0])
        places, own_rows = find_rows(box, np.arange(first, stop))
        if len(places):
            drawn = _formula_rows(formula, shape, first, stop, dtype)[places]
            result[own_rows] = take(drawn, with_rows(len(places), columns_of(box)))
    return result


def _formula_rows(
    formula: Initial, shape: tuple[int, ...], first: int, stop: int, dtype: np.dtype[Any]
) -> Array:
    match formula:
        case Normal(mean=mean, scale=scale, seed=seed):
            return normal_rows(seed, shape, first, stop, dtype, mean=mean, scale=scale)
        case Uniform(low=low, high=high, seed=seed):
            return uniform_rows(seed, shape, first, stop, dtype, low=low, high=high)
        case _:
            raise AssertionError(f"no formula: {formula}")


def _make_whole(path: Path, output: str) -> Array:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    disabled = [*UNSOUND, *WRONG_OF_VECTORS]
    session = ort.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
    )
    (whole,) = session.run([output], {})
    return np.asarray(whole)


def _checked(variable: PlanVariable, values: Array) -> Array:
    if values.shape == variable.shape and values.dtype == np.dtype(variable.dtype):
        return values
    raise BadPlan(
        f"an initial value is {values.dtype}{list(values.shape)}, not {variable.dtype}{list(variable.shape)}",
        at=f"variable {variable.name!r}",
        fix="compile the model again",
    )


def _check_given(name: str, array: Array, variables: Mapping[str, PlanVariable]) -> None:
    if name not in variables:
        raise BadData(
            f"an initial value for {name!r}, which is no variable of the plan",
            at=f"initial values: {name}",
            fix=f"use names among {some_of(sorted(variables))}; of another plan's variables, "
            "give those that this one has, too",
        )
    variable = variables[name]
    if array.shape != variable.shape or array.dtype != np.dtype(variable.dtype):
        raise BadData(
            f"an initial value is {array.dtype}{list(array.shape)}, "
            f"the variable {variable.dtype}{list(variable.shape)}",
            at=f"initial values: {name}",
            fix="give values of the variable's element type and shape",
        )
