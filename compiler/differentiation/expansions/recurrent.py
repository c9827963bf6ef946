"""LSTM, GRU and RNN written as primitive ops, one cell after the other along a sequence of known length.

    [t, b, i] ── MatMul by all gates' weights ── Split along t ──> one [1, b, gates h] per step
    step t    ── Add of the state's MatMul ── gates ──> state t          Concat of the states: Y

A sequence that is shorter than the others keeps its state beyond its end, and its outputs there are 0;
backwards, it starts to change its state at its own end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from partc.compiler.differentiation.expansions.recurrent_cells import (
    DEFAULTS,
    Activation,
    Cell,
    CellState,
    Direction,
    gru_cell,
    lstm_cell,
    resets_before,
    rnn_cell,
)
from partc.compiler.differentiation.forward_node import ForwardNode
from partc.runtime.errors import UnsupportedModel, one_of


@dataclass(frozen=True, slots=True)
class _Kind:
    gates: int
    activations: tuple[str, ...]
    states: int
    cell: Cell
    adds_whole_bias: Callable[[ForwardNode], bool]  # may the state's bias join the input's?


# ---------------------------------------------------------------- the sequence


def _expansion(kind: _Kind) -> Callable[[ForwardNode], Sequence[str]]:
    def expand(at: ForwardNode) -> Sequence[str]:
        batch_first = bool(at.integer("layout", 0))
        x = at.op("Transpose", at.x(0), perm=[1, 0, 2]) if batch_first else at.x(0)
        steps = at.static_shape(at.x(0))[1] if batch_first else _steps(at)
        ways = [_run_direction(at, kind, way, x, steps) for way in range(_way_count(at))]
        return _outputs(at, ways, batch_first)

    return expand


def _steps(at: ForwardNode) -> int:
    steps = at.shape(at.x(0))[0]
    if isinstance(steps, int) and steps > 0:
        return steps
    raise UnsupportedModel(
        f"the sequence length {steps!r} must be known, and at least 1",
        at=at.place,
        fix="export the model with a fixed sequence length; only the batch may be symbolic",
    )


def _way_count(at: ForwardNode) -> int:
    return 2 if at.attribute("direction") == "bidirectional" else 1


@dataclass(frozen=True, slots=True)
class _Way:
    """What one direction gave: outputs [1, b, h] in the order of time, and the last state."""

    outputs: tuple[str, ...]
    last: CellState


def _run_direction(at: ForwardNode, kind: _Kind, way: int, x: str, steps: int) -> _Way:
    direction = _direction(at, kind, way)
    products = at.op("MatMul", x, direction.weights)
    if direction.bias:
        bias = direction.bias[0]
        if kind.adds_whole_bias(at):
            bias = at.op("Add", *direction.bias)
        products = at.op("Add", products, bias)
    inputs = (
        (products,) if steps == 1 else at.build.call("Split", (products,), steps, axis=0, num_outputs=steps)
    )
    backwards = way == 1 or at.attribute("direction") == "reverse"
    order = range(steps)[::-1] if backwards else range(steps)
    state = _initial_state(at, kind, way)
    outputs = [""] * steps
    for step in order:
        following = kind.cell(at, direction, inputs[step], state)
        outputs[step], state = _mask(at, step, following, state)
    return _Way(tuple(outputs), state)


def _mask(at: ForwardNode, step: int, following: CellState, state: CellState) -> tuple[str, CellState]:
    """Return a step's output and the state after it: beyond a sequence's end 0, and the state before."""
    assert following[0]
    if not at.x(4):
        return following[0], following
    lengths = at.op("Unsqueeze", at.x(4), at.build.ints(1))  # [b, 1]
    within = at.op("Greater", lengths, at.build.constant(np.array(step, np.int32)))
    zero = at.scalar(0, like=at.x(0))
    steps_mask = tuple(
        at.op("Where", within, new, old or zero) for new, old in zip(following, state, strict=True) if new
    )
    return at.op("Where", within, following[0], zero), steps_mask


def _outputs(at: ForwardNode, ways: Sequence[_Way], batch_first: bool) -> list[str]:
    """Return Y [t, d, b, h] and the last states [d, b, h]; batch first: [b, t, d, h] and [b, d, h]."""
    axis = at.build.ints(2 if batch_first else 1)
    outputs = []
    if at.node.output[0]:
        sequences = [_join(at, way.outputs, 0) for way in ways]
        if batch_first:
            sequences = [at.op("Transpose", sequence, perm=[1, 0, 2]) for sequence in sequences]
        outputs.append(
            _join(at, [at.op("Unsqueeze", sequence, axis) for sequence in sequences], -3 + batch_first)
        )
    else:
        outputs.append("")
    for index in range(len(ways[0].last)):
        last = _join(at, [way.last[index] or "" for way in ways], 0)
        outputs.append(at.op("Transpose", last, perm=[1, 0, 2]) if batch_first else last)
    return outputs


def _join(at: ForwardNode, parts: Sequence[str], axis: int) -> str:
    return parts[0] if len(parts) == 1 else at.op("Concat", *parts, axis=axis)


# ---------------------------------------------------------------- weights and states of a direction


def _direction(at: ForwardNode, kind: _Kind, way: int) -> Direction:
    hidden = at.static_shape(at.x(2))[2]
    weights, recurrent = (
        at.op("Transpose", _of_direction(at, at.x(index), way), perm=[1, 0]) for index in (1, 2)
    )
    bias = peephole = None
    if at.x(3):
        bias = at.build.call("Split", (_of_direction(at, at.x(3), way),), 2, axis=0, num_outputs=2)
    if at.x(7):
        peephole = at.build.call("Split", (_of_direction(at, at.x(7), way),), 3, axis=0, num_outputs=3)
    return Direction(
        weights,
        recurrent,
        (bias[0], bias[1]) if bias else None,
        peephole or (),
        _activations(at, kind, way),
        hidden,
    )


def _of_direction(at: ForwardNode, stacked: str, way: int) -> str:
    """Return one direction's slice of a tensor stacked along axis 0, without that axis."""
    return at.op("Squeeze", _part(at, stacked, way), at.build.ints(0))


def _part(at: ForwardNode, stacked: str, way: int) -> str:
    if _way_count(at) == 1:
        return stacked
    return at.build.call("Split", (stacked,), 2, axis=0, num_outputs=2)[way]


def _initial_state(at: ForwardNode, kind: _Kind, way: int) -> CellState:
    states = []
    for index in range(5, 5 + kind.states):
        name = at.x(index)
        if name and at.integer("layout", 0):
            name = at.op("Transpose", name, perm=[1, 0, 2])
        states.append(_part(at, name, way) if name else None)
    return tuple(states)


def _activations(at: ForwardNode, kind: _Kind, way: int) -> tuple[Activation, ...]:
    """Read the activations of one direction; alphas and betas are dealt out in order."""
    attribute = at.attribute("activations")
    names = (
        [n.decode() if isinstance(n, bytes) else str(n) for n in attribute]
        if isinstance(attribute, list)
        else []
    )
    names = [name.lower() for name in names or kind.activations * _way_count(at)]
    alphas, betas = _numbers(at, "activation_alpha"), _numbers(at, "activation_beta")
    activations = []
    for name in names:
        if name not in DEFAULTS:
            raise UnsupportedModel(
                f"the activation {name!r} is not known",
                at=at.place,
                fix=one_of(sorted(DEFAULTS), name),
            )
        constants = list(DEFAULTS[name])
        for index, values in enumerate((alphas, betas)[: len(constants)]):
            if values:
                constants[index] = values.pop(0)
        activations.append(Activation(name, tuple(constants)))
    count = len(kind.activations)
    return tuple(activations[way * count : (way + 1) * count])


def _numbers(at: ForwardNode, name: str) -> list[float]:
    value = at.attribute(name)
    return [float(number) for number in value] if isinstance(value, list) else []


RNN = _expansion(_Kind(1, ("Tanh",), 1, rnn_cell, lambda _: True))
LSTM = _expansion(_Kind(4, ("Sigmoid", "Tanh", "Tanh"), 2, lstm_cell, lambda _: True))
GRU = _expansion(_Kind(3, ("Sigmoid", "Tanh"), 1, gru_cell, resets_before))
