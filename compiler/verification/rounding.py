"""What rounding may make of one step, element by element: measured, and only where it is needed.

Nobody knows how a gradient's sums were rounded, but what rounding can do shows when the last bits of all
variables, and of what each gradient is summed from, are changed at random:

    e = 8 max|gradient (variables) - gradient (variables (1 + eps x))|        x of -1, 0 and 1, two draws

An exact update of a gradient that is within e is no error. So the update itself is carried out for the
gradient and for both ends,

    deviation = 2 max(|next (gradient + e) - next|, |next (gradient - e) - next|)

of each element of every variable. Gradient descent makes as small a change of e. Adam divides by the
gradient's own size, so where |gradient| < e (the key projection's bias under softmax, a bias before a
normalisation: zero in theory) the two ends are steps in opposite directions. Twice, since an update need
not be monotonic between the ends.

A gradient that is exactly zero is either a sum of zeros (a row that is not read), to which no e is added, or
one of terms that happen to cancel. Such terms cancel no longer where each is a little off (nudge_terms.py).
If they cancel in both draws too, e is at least 8 eps of what is left of them for each 1 they were off.

Two more ends tell what elements do to each other: the gradient with every second element's e added, and
the gradient e nearer to zero. LAMB divides by the length of a whole vector. If all of it is rounding, and an
element moves otherwise where only others' gradients do, the step has a length and no direction: it may fall
upon one element. What all elements may be off by together (the length of the vector of deviations), each may
be off by alone.

Statistics of the samples (running means) and the loss may be off by 8 times what the draws make of them.

A unit of a ReLU that is nearly zero may come out on either side of it. Then a gradient jumps, and two draws
of 1 eps seldom tell. A thorough measurement draws more often, of all replicas, and changes 8 eps at once: a
unit that 8 eps may turn over is turned over.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from partc.compiler.verification.nudge_terms import SCATTER
from partc.compiler.verification.sessions import Array, eps_of, is_float, max_abs, wide
from partc.compiler.verification.split_step import SplitStep, Tensors

ROUNDINGS = 8
DRAWS = 2
THOROUGH_DRAWS = 8  # of them, or of one for each replica


@dataclass(frozen=True, slots=True)
class RoundingError:
    """What a step may be off by: `variables` by element, in the variable's unit; the loss."""

    variables: Mapping[str, Array] = field(default_factory=dict)
    loss: float = 0.0


def measure_rounding(
    split: SplitStep,
    inputs: Mapping[str, Array],
    variables: Collection[str],
    passed_types: Mapping[str, np.dtype[Any]],
    thoroughly: bool = False,
) -> RoundingError:
    """Measure on one step's inputs; gradients on the first replica's samples, `thoroughly` on all replicas'.

    `passed_types`: variable -> the narrowest float type that its change passes through (reference.py).
    """
    random = np.random.default_rng(0)
    parts = split.parts(inputs)

    def redraw(replica: int, roundings: int) -> Tensors:
        perturbed = perturb_variables(inputs, variables, random, passed_types, roundings)
        return split.part_with_other_rounding(perturbed, replica)

    redrawn_parts = [redraw(0, 1) for _ in range(DRAWS)]
    errors = {name: ROUNDINGS * max(_difference(parts[0][name], draw[name]) for draw in redrawn_parts)
              for name, value in parts[0].items() if is_float(value)}  # fmt: skip
    for number in range(max(THOROUGH_DRAWS, len(parts)) if thoroughly else 0):
        replica = number % len(parts)
        draw = redraw(replica, ROUNDINGS)
        for name, error in errors.items():
            errors[name] = max(error, _difference(parts[replica][name], draw[name]))
    scattered_part = split.part_without_cancelling(inputs, 0)
    shift = {
        tensor: _gradient_errors(kind == "rows", errors[tensor], scattered_part[tensor],
                       [part[tensor] for part in parts], [draw[tensor] for draw in redrawn_parts])
        * split.share_of_sum(tensor)
        for tensor, kind in split.halves.gradients.items()
        if kind != "ids"
    }  # fmt: skip
    deviations = _deviations_of_updates(split, inputs, split.combine_gradients(parts), shift)
    deviations |= {
        variable: np.asarray(errors[output])
        for variable, output in split.state.items()
        if variable not in deviations and output in errors
    }
    return RoundingError(deviations, max((errors[name] for name in split.halves.loss), default=0.0))


def perturb_variables(
    inputs: Mapping[str, Array],
    variables: Collection[str],
    random: np.random.Generator,
    passed_types: Mapping[str, np.dtype[Any]],
    roundings: int = 1,
) -> dict[str, Array]:
    """Return what is given with the variables' last bits changed at random; integers as they are.

    The last bits are those that are left of a variable on its way through the step, times `roundings`.
    """
    return {
        name: _perturb(value, random, passed_types.get(name, value.dtype), roundings)
        if name in variables and is_float(value)
        else value
        for name, value in inputs.items()
    }


def _perturb(value: Array, random: np.random.Generator, passed: np.dtype[Any], roundings: int) -> Array:
    exact = wide(value)
    signs = random.integers(-1, 2, value.shape, np.int8)
    eps = roundings * max(eps_of(value.dtype), eps_of(passed))
    result: Array = np.asarray(exact * (1 + exact.dtype.type(eps) * signs), value.dtype)
    return result


def _gradient_errors(
    are_rows: bool, error: float, scattered: Array, parts: list[Array], draws: list[Array]
) -> Array:
    """Return e of each element; what is a sum of zeros has none."""
    magnitude = np.abs(np.nan_to_num(wide(scattered), nan=0.0, posinf=0.0, neginf=0.0))
    if are_rows:
        is_known = np.concatenate([part != 0 for part in parts])
        magnitude = np.concatenate([magnitude, *(np.zeros_like(part) for part in parts[1:])])
    else:
        is_known = np.any([gradient != 0 for gradient in (*parts, *draws)], axis=0)
    # Of terms that cancel in all draws, e follows from what is left if they are farther off.
    cancelled_error = (
        ROUNDINGS * eps_of(scattered.dtype) / SCATTER * np.max(magnitude, initial=0.0, where=~is_known)
    )
    return np.where(is_known, error, np.where(magnitude > 0, max(error, cancelled_error), 0.0))


def _deviations_of_updates(
    split: SplitStep, inputs: Mapping[str, Array], gradients: Tensors, shift: Mapping[str, Array]
) -> dict[str, Array]:
    """Return what updates may be off by, if each gradient is off by up to `shift`."""
    ups = {name: shift[name] for name in gradients if name in shift}
    alternate = {name: np.where(_every_second(up), up, 0.0) for name, up in ups.items()}
    nearer = {name: -np.clip(wide(gradients[name]), -up, up) for name, up in ups.items()}
    downs = {name: -up for name, up in ups.items()}
    exact, *ends = (
        split.update(inputs, _shifted(gradients, by)) for by in ({}, ups, alternate, downs, nearer)
    )
    are_noise = {name for name, up in ups.items() if np.all(np.abs(wide(gradients[name])) <= up)}
    deviations = {}
    for variable, output in split.state.items():
        if output not in exact:
            continue
        deviation = _deviation(exact[output], [end[output] for end in ends])
        noise = split.gradients_of(variable) & are_noise
        if noise and _move_each_other(ends[0][output], ends[1][output]):
            up = ups[min(noise)]
            may_move = (up if up.shape == deviation.shape else deviation) > 0  # rows have another shape
            deviation = np.where(may_move, np.linalg.norm(deviation), deviation)
        deviations[variable] = deviation
    return deviations


def _every_second(array: Array) -> Array:
    return np.asarray(np.arange(array.size) % 2 == 1).reshape(array.shape)


def _move_each_other(all_shifted: Array, every_second_shifted: Array) -> bool:
    """Tell whether elements whose gradient is shifted in both ends are not moved alike."""
    alike = _every_second(all_shifted)
    return not np.array_equal(all_shifted[alike], every_second_shifted[alike])


def _shifted(gradients: Tensors, by: Mapping[str, Array]) -> Tensors:
    return {
        name: np.asarray(wide(value) + by[name], value.dtype) if name in by else value
        for name, value in gradients.items()
    }


def _deviation(exact: Array, others: list[Array]) -> Array:
    if not is_float(exact):
        return np.zeros(exact.shape)
    with np.errstate(invalid="ignore"):  # an overflow in both, which is told
        farthest: Array = np.max([np.abs(wide(other) - wide(exact)) for other in others], axis=0)
    return 2 * farthest


def _difference(one: Array, other: Array) -> float:
    with np.errstate(invalid="ignore"):  # an overflow in both, whose step is skipped
        difference = max_abs(wide(one) - wide(other))
    return difference if np.isfinite(difference) else 0.0
