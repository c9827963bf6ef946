"""The optimizer model of onnxruntime-training as updates of single parameters, in standard ops.

    clip     g' = g c / (|all g| + 1e-6) where |all g| > c           InplaceClipGradNorm
    SGD      W' = W - lr g                                           SGDOptimizerV2
    AdamW    m' = a m + (1 - a) g     v' = b v + (1 - b) g^2         AdamWOptimizer
             mode 0 (PyTorch's)    W' = W (1 - lr d) - lr / A m' / (sqrt(v' / B) + e)
             mode 1 (transformers') U = W - lr sqrt(B) / A m' / (sqrt(v') + e)    W' = U (1 - lr d)
             A = 1 - a^t, B = 1 - b^t, t from 1; both 1 without correct_bias

Source: orttraining/training_ops/cpu/optimizer of onnxruntime 1.19 (adamw, sgd, clip_grad_norm).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper

from partc.compiler.differentiation.node_builder import NodeBuilder
from partc.runtime.errors import UnsupportedModel

LEARNING_RATE, STEP = "learning_rate", "step"
_CLIP_EPSILON = 1e-6
_Attributes = Mapping[str, int | float]


@dataclass(frozen=True, slots=True)
class ZeroSlot:
    """A variable that starts as zeros: shaped like `like`, or int64[1] where that is None."""

    name: str
    like: str | None


@dataclass
class OptimizerStep:
    """What the optimizer adds to the graph of loss and gradients."""

    build: NodeBuilder
    gradients: dict[str, str]  # by parameter
    next_values: dict[str, str] = field(default_factory=dict)
    slots: list[ZeroSlot] = field(default_factory=list)

    def scalar(self, value: float) -> str:
        """Return a float32 constant: the optimizers know no other type."""
        return self.build.constant(np.array(value, np.float32))

    def finish(self, variable: str, op_type: str, *inputs: str) -> None:
        """Emit the op that makes a variable's next value."""
        (name,) = self.build.call(op_type, inputs, (self.build.fresh(f"{variable}_next"),))
        self.next_values[variable] = name

    def slot(self, parameter: str, suffix: str) -> str:
        """Create a slot shaped like a parameter."""
        name = self.build.fresh(f"{parameter}.{suffix}")
        self.slots.append(ZeroSlot(name, parameter))
        return name


def add_optimizer(model: onnx.ModelProto, step: OptimizerStep) -> None:
    """Emit the updates of all parameters. Raises UnsupportedModel for an optimizer that is not known."""
    for node in model.graph.node:
        if node.op_type not in _OPTIMIZER_OPS:
            raise UnsupportedModel(
                f"optimizer op {node.op_type!r}",
                at=f"optimizer_model.onnx, node {node.name or node.output[0]!r}",
                fix=f"use an optimizer made of {', '.join(sorted(_OPTIMIZER_OPS))}",
            )
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        _OPTIMIZER_OPS[node.op_type](step, attributes)
    step.build.scope = ""


def _clip(step: OptimizerStep, attributes: _Attributes) -> None:
    build, max_norm = step.build, step.scalar(attributes.get("max_norm", 1.0))
    build.scope = "clip/"
    squares = [
        build.op("ReduceSum", build.op("Mul", gradient, gradient), keepdims=0)
        for gradient in step.gradients.values()
    ]
    norm = build.op("Sqrt", build.op("Sum", *squares))
    shrunk = build.op("Div", max_norm, build.op("Add", norm, step.scalar(_CLIP_EPSILON)))
    scale = build.op("Min", shrunk, step.scalar(1.0))
    for parameter, gradient in step.gradients.items():
        step.gradients[parameter] = build.op("Mul", gradient, scale)


def _sgd(step: OptimizerStep, attributes: _Attributes) -> None:
    for parameter, gradient in step.gradients.items():
        step.build.scope = f"{parameter}/update/"
        step.finish(parameter, "Sub", parameter, step.build.op("Mul", _rate(step), gradient))


def _rate(step: OptimizerStep) -> str:
    """Return the learning rate as a scalar: it comes as float[1]."""
    return step.build.op("Squeeze", LEARNING_RATE, step.build.ints(0))


def _adamw(step: OptimizerStep, attributes: _Attributes) -> None:
    step.build.scope = "step/"
    step.slots.append(ZeroSlot(STEP, None))
    step.finish(STEP, "Add", STEP, step.build.ints(1))
    for parameter, gradient in step.gradients.items():
        step.build.scope = f"{parameter}/update/"
        _adamw_of(step, parameter, gradient, _Adam(**_attribute_values(attributes)))


@dataclass(frozen=True, slots=True)
class _Adam:
    """The operator's attributes, with its defaults."""

    alpha: float = 0.9
    beta: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 1e-2
    adam_mode: float = 0
    correct_bias: float = 1


def _attribute_values(attributes: _Attributes) -> dict[str, float]:
    return {name: attributes[name] for name in _Adam.__dataclass_fields__ if name in attributes}


def _adamw_of(step: OptimizerStep, parameter: str, gradient: str, adam: _Adam) -> None:
    op = step.build.op
    first = _moment(step, step.slot(parameter, "first_moment"), adam.alpha, gradient)
    squares = op("Mul", gradient, gradient)
    second = _moment(step, step.slot(parameter, "second_moment"), adam.beta, squares)
    rate, epsilon = _rate(step), step.scalar(adam.epsilon)
    decay_factor = op("Sub", step.scalar(1.0), op("Mul", rate, step.scalar(adam.weight_decay)))
    one_a, one_b = _correction(step, adam, adam.alpha), _correction(step, adam, adam.beta)
    if adam.adam_mode == 0:
        divisor = op("Add", op("Div", op("Sqrt", second), op("Sqrt", one_b)), epsilon)
        change = op("Div", op("Mul", op("Div", rate, one_a), first), divisor)
        step.finish(parameter, "Sub", op("Mul", parameter, decay_factor), change)
        return
    pace = op("Div", op("Mul", rate, op("Sqrt", one_b)), one_a)
    change = op("Div", op("Mul", pace, first), op("Add", op("Sqrt", second), epsilon))
    step.finish(parameter, "Mul", op("Sub", parameter, change), decay_factor)


def _moment(step: OptimizerStep, slot: str, decay: float, increment: str) -> str:
    op = step.build.op
    old_part = op("Mul", slot, step.scalar(decay))
    step.finish(slot, "Add", old_part, op("Mul", increment, step.scalar(1 - decay)))
    return step.next_values[slot]


def _correction(step: OptimizerStep, adam: _Adam, decay: float) -> str:
    """Return 1 - decay^t."""
    if not adam.correct_bias:
        return step.scalar(1.0)
    op = step.build.op
    count = op("Cast", op("Squeeze", step.next_values[STEP], step.build.ints(0)), to=onnx.TensorProto.FLOAT)
    return op("Sub", step.scalar(1.0), op("Pow", step.scalar(decay), count))


_OPTIMIZER_OPS: Mapping[str, Callable[[OptimizerStep, _Attributes], None]] = {
    "AdamWOptimizer": _adamw,
    "InplaceClipGradNorm": _clip,
    "SGDOptimizerV2": _sgd,
}
