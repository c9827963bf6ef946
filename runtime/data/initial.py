"""The variables' first values, made by their owners, only the rows that they own."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from safetensors import safe_open

from partc.runtime.data.draws import normal_rows, uniform_rows
from partc.runtime.errors import BadData, BadPlan
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Constant, Initial, Made, Normal, PlanVariable, Stored, Uniform

Array = np.ndarray[Any, np.dtype[Any]]


class InitialValues:
    """First values by variable and rows, from the plan or from `given` whole tensors."""

    def __init__(self, folder: PlanFolder, given: Mapping[str, Array] | None = None) -> None:
        self._folder = folder.path
        self._variables = {variable.name: variable for variable in folder.plan.variables}
        self._given = dict(given or {})
        self._make = cache(_make_whole)
        for name, array in self._given.items():
            _check_given(name, array, self._variables)

    def rows(self, name: str, start: int | None = None, stop: int | None = None) -> Array:
        """Return a fresh copy of rows [start, stop) of variable `name`, whole if start is None."""
        variable = self._variables[name]
        if name in self._given:
            return np.array(
                self._given[name][start:stop] if start is not None else self._given[name], order="C"
            )
        values = self._draw(variable, start, stop)
        return _checked(variable, values, start, stop)

    def _draw(self, variable: PlanVariable, start: int | None, stop: int | None) -> Array:
        match variable.initial:
            case Stored(file=file, key=key):
                return _stored_rows(self._folder / file, key, start, stop)
            case Made(file=file, output=output):
                return _rows_of(self._make(self._folder / file, output), start, stop)
            case formula:
                return _formula_rows(formula, variable, start, stop)


def _rows_of(whole: Array, start: int | None, stop: int | None) -> Array:
    return np.array(whole if start is None else whole[start:stop], order="C")


def _formula_rows(formula: Initial, variable: PlanVariable, start: int | None, stop: int | None) -> Array:
    dtype = np.dtype(variable.dtype)
    shape = variable.shape or (1,)
    first, last = (0, shape[0]) if start is None or stop is None else (start, stop)
    result_shape = (last - first, *shape[1:]) if variable.shape else ()
    match formula:
        case Constant(value=value):
            return np.full(result_shape, value, dtype)
        case Normal(mean=mean, scale=scale, seed=seed):
            drawn = normal_rows(seed, shape, first, last, dtype, mean=mean, scale=scale)
        case Uniform(low=low, high=high, seed=seed):
            drawn = uniform_rows(seed, shape, first, last, dtype, low=low, high=high)
        case _:
            raise AssertionError(f"no formula: {formula}")
    return drawn.reshape(result_shape)


def _stored_rows(path: Path, key: str, start: int | None, stop: int | None) -> Array:
    with safe_open(path, framework="numpy") as tensors:
        if start is None:
            whole: Array = tensors.get_tensor(key)
            return whole
        rows = tensors.get_slice(key)
        if start == stop:  # safetensors refuses an empty slice at the end
            return np.asarray(rows[0:1])[:0]
        owned: Array = rows[start:stop]
        return owned


def _make_whole(path: Path, output: str) -> Array:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (whole,) = session.run([output], {})
    return np.asarray(whole)


def _checked(variable: PlanVariable, values: Array, start: int | None, stop: int | None) -> Array:
    rows = variable.shape[:1] if start is None or stop is None else (stop - start,)
    expected = (*rows, *variable.shape[1:])
    if values.shape == expected and values.dtype == np.dtype(variable.dtype):
        return values
    raise BadPlan(
        f"an initial value is {values.dtype}{list(values.shape)}, not {variable.dtype}{list(expected)}",
        at=f"variable {variable.name!r}",
        fix="compile the model again",
    )


def _check_given(name: str, array: Array, variables: Mapping[str, PlanVariable]) -> None:
    if name not in variables:
        raise BadData(
            f"an initial value for {name!r}, which is no variable of the plan",
            at=f"initial values: {name}",
            fix=f"use names among {sorted(variables)[:8]}",
        )
    variable = variables[name]
    if array.shape != variable.shape or array.dtype != np.dtype(variable.dtype):
        raise BadData(
            f"an initial value is {array.dtype}{list(array.shape)}, "
            f"the variable {variable.dtype}{list(variable.shape)}",
            at=f"initial values: {name}",
            fix="give values of the variable's element type and shape",
        )
