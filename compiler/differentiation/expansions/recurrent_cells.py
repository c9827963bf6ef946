"""The cells of LSTM, GRU and RNN: one step, from the input's product and the state to the next state.

Equations: the operators' pages of ONNX.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from partc.compiler.differentiation.forward_node import ForwardNode

# A cell's state: one tensor [1, b, h] for GRU and RNN, hidden and cell for LSTM; None is all zeros.
CellState = tuple[str | None, ...]

# Alpha and beta where an activation has them, as the operators' pages give them.
DEFAULTS: Mapping[str, tuple[float, ...]] = {
    "affine": (1.0, 0.0),
    "elu": (1.0,),
    "hardsigmoid": (0.2, 0.5),
    "leakyrelu": (0.01,),
    "relu": (),
    "scaledtanh": (1.0, 1.0),
    "sigmoid": (),
    "softplus": (),
    "softsign": (),
    "tanh": (),
    "thresholdedrelu": (1.0,),
}
OPS: Mapping[str, str] = {
    "elu": "Elu",
    "leakyrelu": "LeakyRelu",
    "relu": "Relu",
    "sigmoid": "Sigmoid",
    "softplus": "Softplus",
    "softsign": "Softsign",
    "tanh": "Tanh",
    "thresholdedrelu": "ThresholdedRelu",
}


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation, its name in lower case, with its alpha and beta where it has them."""

    kind: str
    constants: tuple[float, ...]

    def apply(self, at: ForwardNode, x: str) -> str:
        """Return the activation of x, clipped first where the node says so."""
        clip = at.attribute("clip")
        if clip is not None:
            clip_bound = at.number("clip", 0.0)
            x = at.op("Clip", x, at.scalar(-clip_bound, like=at.x(0)), at.scalar(clip_bound, like=at.x(0)))
        if self.kind in OPS:
            names = ("alpha", "beta")[: len(self.constants)]
            return at.op(OPS[self.kind], x, **dict(zip(names, self.constants, strict=True)))
        alpha, beta = (at.scalar(value, like=at.x(0)) for value in self.constants)
        if self.kind in ("affine", "hardsigmoid"):
            line = at.op("Add", at.op("Mul", x, alpha), beta)
            bounds = (at.scalar(value, like=at.x(0)) for value in (0, 1))
            return line if self.kind == "affine" else at.op("Clip", line, *bounds)
        return at.op("Mul", at.op("Tanh", at.op("Mul", x, beta)), alpha)


@dataclass(frozen=True, slots=True)
class Direction:
    """The weights of one direction."""

    weights: str  # [i, gates h]
    recurrent: str  # [h, gates h]
    bias: tuple[str, str] | None  # of the input's and of the state's products, [gates h]
    peephole: tuple[str, ...]  # LSTM: of input, output and forget gate, [h]
    activations: tuple[Activation, ...]
    hidden: int


# A cell takes the input's product [1, b, gates h] and the state, and returns the state that follows.
Cell = Callable[[ForwardNode, Direction, str, CellState], CellState]


# ---------------------------------------------------------------- cells


def _of_state(at: ForwardNode, direction: Direction, x: str, state: str | None) -> str:
    """Add the state's product to the input's."""
    return x if state is None else at.op("Add", x, at.op("MatMul", state, direction.recurrent))


def _gates(at: ForwardNode, product: str, count: int) -> tuple[str, ...]:
    return at.build.call("Split", (product,), count, axis=2, num_outputs=count)


def rnn_cell(at: ForwardNode, direction: Direction, x: str, state: CellState) -> CellState:
    """h = f(x + h' R)."""
    return (direction.activations[0].apply(at, _of_state(at, direction, x, state[0])),)


def lstm_cell(at: ForwardNode, direction: Direction, x: str, state: CellState) -> CellState:
    """i, f = s(..), c = f c' + i g(..), o = s(..), h = o t(c); peepholes look at c' and c."""
    hidden, cell = state
    sigma, squash, shape_cell = direction.activations
    i, o, f, g = _gates(at, _of_state(at, direction, x, hidden), 4)
    i_gate = sigma.apply(at, _peep(at, direction, i, 0, cell))
    candidate = at.op("Mul", i_gate, squash.apply(at, g))
    if cell is None:
        following = candidate
    else:
        if at.integer("input_forget", 0):
            f_gate = at.op("Sub", at.scalar(1, like=at.x(0)), i_gate)
        else:
            f_gate = sigma.apply(at, _peep(at, direction, f, 2, cell))
        following = at.op("Add", at.op("Mul", f_gate, cell), candidate)
    o_gate = sigma.apply(at, _peep(at, direction, o, 1, following))
    return at.op("Mul", o_gate, shape_cell.apply(at, following)), following


def _peep(at: ForwardNode, direction: Direction, gate: str, index: int, cell: str | None) -> str:
    if not direction.peephole or cell is None:
        return gate
    return at.op("Add", gate, at.op("Mul", direction.peephole[index], cell))


def gru_cell(at: ForwardNode, direction: Direction, x: str, state: CellState) -> CellState:
    """z, r = s(..), n = g(.. r ..), h = (1 - z) n + z h'."""
    hidden, sizes = state[0], at.build.ints(2 * direction.hidden, direction.hidden)
    sigma, squash = direction.activations
    x_gates, x_new = at.build.call("Split", (x, sizes), 2, axis=2)
    r_gates, r_new = at.build.call("Split", (direction.recurrent, sizes), 2, axis=1)
    if not resets_before(at):
        bias_gates, bias_new = _state_bias(at, direction, sizes)
        x_gates = at.op("Add", x_gates, bias_gates) if bias_gates else x_gates
    else:
        bias_new = None
    product = x_gates if hidden is None else at.op("Add", x_gates, at.op("MatMul", hidden, r_gates))
    z, r = _gates(at, sigma.apply(at, product), 2)
    new = squash.apply(at, _new_gate(at, x_new, (r, hidden, r_new, bias_new)))
    fresh = at.op("Mul", at.op("Sub", at.scalar(1, like=at.x(0)), z), new)
    return (fresh if hidden is None else at.op("Add", fresh, at.op("Mul", z, hidden)),)


def resets_before(at: ForwardNode) -> bool:
    """Tell whether the reset gate meets the state before the product, which is the default."""
    return not at.integer("linear_before_reset", 0)


def _state_bias(at: ForwardNode, direction: Direction, sizes: str) -> tuple[str | None, str | None]:
    if not direction.bias:
        return None, None
    gates, new = at.build.call("Split", (direction.bias[1], sizes), 2, axis=0)
    return gates, new


def _new_gate(at: ForwardNode, x: str, terms: tuple[str, str | None, str, str | None]) -> str:
    """Return x + (r h') R, or x + r (h' R + b)."""
    reset, hidden, recurrent, bias = terms
    if resets_before(at):
        if hidden is None:
            return x
        return at.op("Add", x, at.op("MatMul", at.op("Mul", reset, hidden), recurrent))
    product = None if hidden is None else at.op("MatMul", hidden, recurrent)
    parts = [part for part in (product, bias) if part]
    if not parts:
        return x
    linear = parts[0] if len(parts) == 1 else at.op("Add", *parts)
    return at.op("Add", x, at.op("Mul", reset, linear))
