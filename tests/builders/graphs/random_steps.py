"""Random training steps: any graph at all must train on N ranks as on one.

A step grows op by op from data [8, ...] and two variables; whatever comes out is reduced to the
variables' shapes and called their gradients. Values pass through Tanh, so that they stay small.
"""

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from partc.compiler.importing.bindings import Bindings, GradientTensors, write_bindings

SAMPLES = 8
Shape = tuple[int, ...]


class StepBuilder:
    """A step under construction: its nodes, the shape of every tensor, and what depends on data."""

    def __init__(self, seed: int, samples: int = SAMPLES, width: int = 4) -> None:
        self.rng = np.random.default_rng(seed)
        self.samples = samples
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.shapes: dict[str, Shape] = {
            "x": (samples, width),
            "z": (2, samples, width),
            "W": (width, width),
            "v": (width,),
        }
        self.sampled = {"x", "z"}

    def op(self, kind: str, inputs: list[str], shape: Shape, **attributes: object) -> str:
        name = f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=f"node{len(self.nodes)}", **attributes))
        self.shapes[name] = shape
        if self.sampled.intersection(inputs):
            self.sampled.add(name)
        return name

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def constant(self, values: np.ndarray) -> str:
        name = f"constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(values, name))
        return name

    def pick(self, allowed: Callable[[Shape], bool] = lambda shape: True) -> str | None:
        """Choose a tensor, most often one that depends on data and has as many entries."""
        names = [name for name, shape in self.shapes.items() if allowed(shape)]
        if not names:
            return None
        weights = np.array([self._weight(name) for name in names])
        return str(self.rng.choice(names, p=weights / weights.sum()))

    def _weight(self, name: str) -> float:
        large = np.prod(self.shapes[name]) % self.samples == 0
        return 6.0 if large and name in self.sampled else 1.0

    def axis(self, shape: Shape) -> int:
        return int(self.rng.integers(len(shape)))


def random_step(seed: int, ops: int = 14, samples: int = SAMPLES, width: int = 4) -> onnx.ModelProto:
    """Return a step with data x [samples, width], z [2, samples, width], variables W [width, width], v."""
    build = StepBuilder(seed, samples, width)
    for _ in range(ops):
        grow = GROWTHS[int(build.rng.integers(len(GROWTHS)))]
        grow(build)
    loss = _total(build, str(list(build.shapes)[-1]))
    gradients = {"W": _gradient(build, "W"), "v": _gradient(build, "v")}
    clip = build.op("Tanh", [build.op("Add", [_total(build, g) for g in gradients.values()], ())], ())
    finished = [_update(build, name, gradient, clip) for name, gradient in gradients.items()]
    return _model(build, loss, dict(zip(gradients, finished, strict=True)), gradients)


# ---------------------------------------------------------------- ways to grow


def _unary(build: StepBuilder) -> None:
    name = build.pick()
    kind = str(build.rng.choice(["Tanh", "Neg", "Relu", "Abs", "Identity", "Sigmoid"]))
    build.op(kind, [str(name)], build.shapes[str(name)])


def _binary(build: StepBuilder) -> None:
    one = str(build.pick())

    def fits(shape: Shape) -> bool:
        try:
            return len(np.broadcast_shapes(shape, build.shapes[one])) <= 3
        except ValueError:
            return False

    other = str(build.pick(fits))
    shape = np.broadcast_shapes(build.shapes[one], build.shapes[other])
    kind = str(build.rng.choice(["Add", "Sub", "Mul", "Max", "Min"]))
    build.op(kind, [one, other], shape)


def _choose(build: StepBuilder) -> None:
    one = str(build.pick())
    shape = build.shapes[one]
    other = str(build.pick(lambda s: s == shape))
    condition = build.op("Greater", [one, build.constant(np.array(0.1))], shape)
    del build.shapes[condition]  # no number: nothing else may read it
    build.op("Where", [condition, one, other], shape)


def _reduce(build: StepBuilder) -> None:
    name = build.pick(lambda shape: len(shape) > 0)
    if name is None:
        return
    shape = build.shapes[name]
    axes = sorted(set(build.rng.integers(len(shape), size=int(build.rng.integers(1, 3))).tolist()))
    keep = int(build.rng.integers(2))
    kind = str(build.rng.choice(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceSumSquare"]))
    left = tuple(1 if i in axes else s for i, s in enumerate(shape) if keep or i not in axes)
    reduced = build.op(kind, [name, build.integers(*axes)], left, keepdims=keep)
    build.op("Tanh", [reduced], left)


def _transpose(build: StepBuilder) -> None:
    name = str(build.pick(lambda shape: len(shape) > 1))
    order = build.rng.permutation(len(build.shapes[name])).tolist()
    build.op("Transpose", [name], tuple(build.shapes[name][axis] for axis in order), perm=order)


def _reshape(build: StepBuilder) -> None:
    """Join two axes, or take one apart; the shape is spelled, has -1, or is computed."""
    name = str(build.pick(lambda shape: len(shape) > 0 and np.prod(shape) > 1))
    shape = build.shapes[name]
    axis = build.axis(shape)
    if len(shape) > 1 and (len(shape) > 2 or build.rng.random() < 0.5):
        axis = min(axis, len(shape) - 2)
        target = (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    elif shape[axis] % 2 == 0:
        target = (*shape[:axis], 2, shape[axis] // 2, *shape[axis + 1 :])
    else:
        target = (*shape[:axis], 1, *shape[axis:])
    spelled = list(target)
    if build.rng.random() < 0.5:
        spelled[build.axis(target)] = -1
    build.op("Reshape", [name, build.integers(*spelled)], target)


def _matmul(build: StepBuilder) -> None:
    left = str(build.pick(lambda shape: len(shape) > 1))
    inner = build.shapes[left][-1]
    right = build.pick(lambda shape: len(shape) == 2 and shape[0] == inner)
    if right is None:
        return
    shape = (*build.shapes[left][:-1], build.shapes[right][1])
    build.op("Tanh", [build.op("MatMul", [left, right], shape)], shape)


def _contract(build: StepBuilder) -> None:
    """Multiply over the leading axis, as a weight gradient does."""
    one = str(build.pick(lambda shape: len(shape) == 2))
    rows = build.shapes[one][0]
    other = str(build.pick(lambda shape: len(shape) == 2 and shape[0] == rows))
    turned = build.op("Transpose", [one], build.shapes[one][::-1], perm=[1, 0])
    build.op("MatMul", [turned, other], (build.shapes[one][1], build.shapes[other][1]))


def _concat(build: StepBuilder) -> None:
    one = str(build.pick(lambda shape: len(shape) > 0 and np.prod(shape) < 200))
    shape = build.shapes[one]
    other = str(build.pick(lambda s: s == shape))
    axis = build.axis(shape)
    joined = tuple(2 * size if i == axis else size for i, size in enumerate(shape))
    build.op("Concat", [one, other], joined, axis=axis)


def _slice(build: StepBuilder) -> None:
    name = str(build.pick(lambda shape: len(shape) > 0))
    shape = build.shapes[name]
    axis = build.axis(shape)
    half = max(1, shape[axis] // 2)
    cut = tuple(half if i == axis else size for i, size in enumerate(shape))
    build.op("Slice", [name, build.integers(0), build.integers(half), build.integers(axis)], cut)


def _softmax(build: StepBuilder) -> None:
    name = str(build.pick(lambda shape: len(shape) > 0))
    shape = build.shapes[name]
    build.op("Softmax", [name], shape, axis=build.axis(shape))


def _cumulate(build: StepBuilder) -> None:
    name = str(build.pick(lambda shape: len(shape) > 0))
    shape = build.shapes[name]
    summed = build.op("CumSum", [name, build.constant(np.array(build.axis(shape)))], shape)
    build.op("Tanh", [summed], shape)


def _gather(build: StepBuilder) -> None:
    name = str(build.pick(lambda shape: len(shape) > 0))
    shape = build.shapes[name]
    axis = build.axis(shape)
    ids = build.rng.integers(shape[axis], size=4)
    picked = (*shape[:axis], 4, *shape[axis + 1 :])
    build.op("Gather", [name, build.constant(ids)], picked, axis=axis)


def _like(build: StepBuilder) -> None:
    """Zeros or ones of a tensor's shape, computed: they are asked for in parts."""
    name = str(build.pick())
    shape = build.shapes[name]
    spelled = build.op("Shape", [name], (len(shape),))
    del build.shapes[spelled]
    value = numpy_helper.from_array(np.array([float(build.rng.integers(2))]), "value")
    build.op("ConstantOfShape", [spelled], shape, value=value)


def _expand(build: StepBuilder) -> None:
    name = str(build.pick(lambda shape: len(shape) < 3))
    shape = build.shapes[name]
    build.op("Expand", [name, build.integers(2, *shape)], (2, *shape))


GROWTHS = [
    _unary,
    _binary,
    _binary,
    _choose,
    _reduce,
    _reduce,
    _transpose,
    _reshape,
    _reshape,
    _matmul,
    _matmul,
    _contract,
    _concat,
    _slice,
    _softmax,
    _cumulate,
    _gather,
    _like,
    _expand,
]


# ---------------------------------------------------------------- the end of a step


def _total(build: StepBuilder, name: str) -> str:
    axes = build.integers(*range(len(build.shapes[name])))
    if not build.shapes[name]:
        return name
    return build.op("ReduceMean", [name, axes], (), keepdims=0)


def _gradient(build: StepBuilder, variable: str) -> str:
    """Make a tensor of the variable's shape that depends on as much as possible."""
    shape = build.shapes[variable]
    alike = [name for name, s in build.shapes.items() if s == shape and name not in ("W", "v")]
    recent = [name for name in list(build.shapes)[-6:] if name not in ("W", "v")]
    scale = build.op("Tanh", [_total(build, recent[0])], ())
    for name in recent[1:]:
        scale = build.op("Add", [scale, _total(build, name)], ())
    base = alike[-1] if alike else variable
    return build.op("Mul", [base, scale], shape)


def _update(build: StepBuilder, name: str, gradient: str, clip: str) -> str:
    shape = build.shapes[name]
    change = build.op("Mul", [build.op("Mul", [gradient, clip], shape), build.constant(np.array(0.1))], shape)
    return build.op("Sub", [name, change], shape)


def _model(
    build: StepBuilder, loss: str, following: dict[str, str], gradients: dict[str, str]
) -> onnx.ModelProto:
    data = [
        helper.make_tensor_value_info(n, TensorProto.DOUBLE, build.shapes[n]) for n in ("x", "z", "W", "v")
    ]
    ends = {loss: (), **{name: build.shapes[variable] for variable, name in following.items()}}
    build.nodes.append(helper.make_node("Identity", [loss], ["loss"], name="last"))
    outputs = [helper.make_tensor_value_info("loss", TensorProto.DOUBLE, ())]
    outputs += [helper.make_tensor_value_info(n, TensorProto.DOUBLE, s) for n, s in ends.items() if n != loss]
    for variable in following:
        value = build.rng.uniform(0.1, 0.9, build.shapes[variable])
        build.constants.append(numpy_helper.from_array(value, variable))
    graph = helper.make_graph(build.nodes, "random", data, outputs, build.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    recorded = {variable: GradientTensors(dense=tensor) for variable, tensor in gradients.items()}
    write_bindings(
        model,
        Bindings(state=following, loss="loss", gradients=recorded, sample_axes={"x": 0, "z": 1}),
    )
    return model
