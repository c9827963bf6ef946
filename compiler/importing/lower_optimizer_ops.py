"""The standard's optimizer ops, which no onnxruntime runs, written out in standard ops.

    before   X_new, V_new = ai.onnx.preview.training.Momentum (R, T, X, G, V)
    after    the operators' own pseudo code, once per optimized tensor

Source: the operators' documentation in the ONNX specification, ai.onnx.preview.training version 1.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import onnx
from onnx import helper

PREVIEW_DOMAIN = "ai.onnx.preview.training"


@dataclass(frozen=True)
class _Optimizer:
    """Body of one update; constants in <angle brackets> are filled in from the attributes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str


_MOMENTUM = """
    decayed = Mul (norm_coefficient, X)
    regularized = Add (decayed, G)
    first = Equal (T, T_zero)
    beta_now = Where (first, one, beta)
    kept = Mul (alpha, V)
    added = Mul (beta_now, regularized)
    V_new = Add (kept, added)
"""
_ADAGRAD = """
    count = CastLike (T, X)
    decay = Mul (count, decay_factor)
    slower = Add (one, decay)
    r = Div (R, slower)
    decayed = Mul (norm_coefficient, X)
    regularized = Add (decayed, G)
    squared = Mul (regularized, regularized)
    H_new = Add (H, squared)
    root = Sqrt (H_new)
    adaptive = Add (root, epsilon)
    scaled = Mul (r, regularized)
    step = Div (scaled, adaptive)
    X_new = Sub (X, step)
"""
_ADAM = """
    decayed = Mul (norm_coefficient, X)
    regularized = Add (decayed, G)
    V_kept = Mul (alpha, V)
    alpha_rest = Sub (one, alpha)
    V_added = Mul (alpha_rest, regularized)
    V_new = Add (V_kept, V_added)
    squared = Mul (regularized, regularized)
    H_kept = Mul (beta, H)
    beta_rest = Sub (one, beta)
    H_added = Mul (beta_rest, squared)
    H_new = Add (H_kept, H_added)
    H_root = Sqrt (H_new)
    H_sqrt = Add (H_root, epsilon)
    count = CastLike (T, X)
    alpha_power = Pow (alpha, count)
    beta_power = Pow (beta, count)
    alpha_left = Sub (one, alpha_power)
    beta_left = Sub (one, beta_power)
    beta_root = Sqrt (beta_left)
    R_scaled = Mul (R, beta_root)
    R_corrected = Div (R_scaled, alpha_left)
    first = Equal (T, T_zero)
    R_adjusted = Where (first, R, R_corrected)
    direction = Mul (R_adjusted, V_new)
    step = Div (direction, H_sqrt)
    X_moved = Sub (X, step)
    left = Sub (one, norm_coefficient_post)
    X_new = Mul (left, X_moved)
"""
_STANDARD = "step = Mul (R, V_new)\n X_new = Sub (X, step)"
_NESTEROV = """
    ahead = Mul (alpha, V_new)
    direction = Add (regularized, ahead)
    step = Mul (R, direction)
    X_new = Sub (X, step)
"""
_OPTIMIZERS = {
    "Momentum": _Optimizer(("X", "G", "V"), ("X_new", "V_new"), _MOMENTUM),
    "Adagrad": _Optimizer(("X", "G", "H"), ("X_new", "H_new"), _ADAGRAD),
    "Adam": _Optimizer(("X", "G", "V", "H"), ("X_new", "V_new", "H_new"), _ADAM),
}
_DEFAULTS = {
    "Momentum": {},
    "Adagrad": {"decay_factor": 0.0, "epsilon": 1e-6, "norm_coefficient": 0.0},
    "Adam": {"alpha": 0.9, "beta": 0.999, "epsilon": 1e-6}
    | {"norm_coefficient": 0.0, "norm_coefficient_post": 0.0},
}


def lower_optimizer_ops(graph: onnx.GraphProto) -> int:
    """Replace Momentum, Adagrad and Adam by standard ops; return how many there were."""
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in graph.node:
        if node.domain == PREVIEW_DOMAIN and node.op_type in _OPTIMIZERS:
            count += 1
            nodes += _lower(node)
        else:
            nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    return count


def _lower(node: onnx.NodeProto) -> Iterable[onnx.NodeProto]:
    """Inputs are R, T, then all X, all G, and so on; outputs all X_new, and so on."""
    optimizer = _OPTIMIZERS[node.op_type]
    tensors = (len(node.input) - 2) // len(optimizer.inputs)
    body = onnx.parser.parse_function(_function_text(node, optimizer))
    for tensor in range(tensors):
        reads = [node.input[2 + kind * tensors + tensor] for kind in range(len(optimizer.inputs))]
        writes = [node.output[kind * tensors + tensor] for kind in range(len(optimizer.outputs))]
        names = {"R": node.input[0], "T": node.input[1]}
        names |= dict(zip(optimizer.inputs, reads, strict=True))
        names |= {inner: name for inner, name in zip(optimizer.outputs, writes, strict=True) if name}
        yield from _instance(body, names, prefix=f"{writes[0]}/{node.op_type}")


def _function_text(node: onnx.NodeProto, optimizer: _Optimizer) -> str:
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    mode = attributes.pop("mode", b"standard").decode()
    numbers = _DEFAULTS[node.op_type] | attributes | {"one": 1.0}
    constants = [
        f"{name}_float = Constant <value_float = {float(value)!r}> ()\n {name} = CastLike ({name}_float, X)"
        for name, value in numbers.items()
    ]
    constants.append("zero = Constant <value_int = 0> ()\n T_zero = CastLike (zero, T)")
    tail = {"Momentum": _NESTEROV if mode == "nesterov" else _STANDARD}.get(node.op_type, "")
    signature = f"({', '.join(('R', 'T', *optimizer.inputs))}) => ({', '.join(optimizer.outputs)})"
    lines = "\n".join([*constants, optimizer.body, tail])
    return f'<opset_import: ["" : 21], domain: "partc"> Step {signature} {{ {lines} }}'


def _instance(body: onnx.FunctionProto, names: dict[str, str], prefix: str) -> Iterable[onnx.NodeProto]:
    for node in body.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{prefix}/{node.output[0]}"
        copy.input[:] = [names.get(name, f"{prefix}/{name}") for name in node.input]
        copy.output[:] = [names.get(name, f"{prefix}/{name}") for name in node.output]
        yield copy
