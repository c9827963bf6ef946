"""Random losses over a batch of n samples, in float64: means over samples, and much that is none.

A loss grows from one value per sample and place, [n, 3, 4], through ops that keep samples apart or take them
together, and is reduced to a number by one of many norms. Which of them are means over the samples is not
said here: running the graph on two halves of a batch, and on the batch, tells.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

PLACES, CLASSES = 3, 4
DATA = {"x": (PLACES, CLASSES), "t": (PLACES, CLASSES), "w": (), "mask": (PLACES,), "labels": (PLACES,)}
PARAMETERS = {"W": (CLASSES, CLASSES), "b": (CLASSES,), "classes": (CLASSES,)}


class LossBuilder:
    """A forward graph under construction."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        names = [f"{kind.lower()}{len(self.nodes)}.{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, name=f"n{len(self.nodes)}", **attributes))
        return names[0]

    def constant(self, value: object, dtype: type = np.float64) -> str:
        name = f"constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def pick(self, *makers: object) -> object:
        return makers[self.rng.integers(len(makers))]

    def model(self, loss: str) -> onnx.ModelProto:
        def info(name: str, kind: int, shape: tuple[object, ...]) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, kind, shape)

        inputs = [
            info(name, TensorProto.INT64 if name == "labels" else TensorProto.DOUBLE, ("n", *shape))
            for name, shape in DATA.items()
        ]
        first = np.random.default_rng(0)
        variables = [
            numpy_helper.from_array(first.normal(size=shape), name) for name, shape in PARAMETERS.items()
        ]
        graph = helper.make_graph(
            self.nodes,
            "loss",
            inputs,
            [info(loss, TensorProto.DOUBLE, ())],
            [*variables, *self.constants],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def random_loss(seed: int) -> onnx.ModelProto:
    """Return the forward graph of a random loss, its scalar output last."""
    g = LossBuilder(seed)
    scores = g.op("Add", g.op("MatMul", "x", "W"), "b")
    for _ in range(g.rng.integers(3)):
        scores = _mixed(g, scores)
    values = _per_place(g, scores)
    loss = _reduced(g, values)
    return g.model(g.op("Identity", _finished(g, loss)))


# ---------------------------------------------------------------- [n, 3, 4] to the same


def _mixed(g: LossBuilder, h: str) -> str:
    """Work on the scores: most of it keeps samples apart."""
    kind = g.rng.integers(16)
    if kind < 3:
        return g.op(["Tanh", "Sigmoid", "Exp"][kind], h)
    if kind == 3:
        return g.op("Softmax", h, axis=int(g.rng.integers(3)))
    if kind == 4:
        return g.op("CumSum", h, g.constant(int(g.rng.integers(3)), np.int64))
    if kind == 5:  # as a convolution over places sees its neighbours: a roll
        axis = int(g.rng.integers(2))
        first = g.op("Slice", h, g.ints(0), g.ints(1), g.ints(axis))
        rest = g.op("Slice", h, g.ints(1), g.ints(np.iinfo(np.int64).max), g.ints(axis))
        return g.op("Concat", rest, first, axis=axis)
    if kind == 6:  # the other way round
        axis = int(g.rng.integers(2))
        return g.op("Slice", h, g.ints(-1), g.ints(np.iinfo(np.int64).min), g.ints(axis), g.ints(-1))
    if kind == 7:  # normalised over some axes
        axes = [(0,), (1,), (2,), (0, 1), (1, 2)][g.rng.integers(5)]
        return g.op("Sub", h, g.op("ReduceMean", h, g.ints(*axes), keepdims=1))
    if kind == 8:  # scores of all pairs of samples, or of places
        if g.rng.integers(2):
            return g.op("MatMul", g.op("MatMul", h, g.op("Transpose", h, perm=[0, 2, 1])), h)
        flat = g.op("Reshape", h, g.ints(-1, PLACES * CLASSES))
        pairs = g.op("MatMul", flat, g.op("Transpose", flat, perm=[1, 0]))
        return g.op("Reshape", g.op("MatMul", g.op("Softmax", pairs), flat), g.ints(-1, PLACES, CLASSES))
    if kind == 9:
        return g.op("Mul", h, g.op("Unsqueeze", g.op("Unsqueeze", "w", g.ints(1)), g.ints(2)))
    if kind == 10:
        return g.op(
            "Reshape", g.op("Tanh", g.op("Reshape", h, g.ints(-1, CLASSES))), g.ints(-1, PLACES, CLASSES)
        )
    if kind == 11:
        return g.op("Transpose", g.op("Sigmoid", g.op("Transpose", h, perm=[1, 0, 2])), perm=[1, 0, 2])
    if kind == 12:  # scaled by the size of the batch, and back, or not
        size = g.op("Cast", g.op("Shape", h, start=0, end=1), to=TensorProto.DOUBLE)
        scaled = g.op("Mul", h, size)
        return g.op("Div", scaled, size) if g.rng.integers(2) else scaled
    if kind == 13:
        return g.op("Div", h, g.op("Add", g.op("ReduceL2", h, g.ints(2), keepdims=1), g.constant(1.0)))
    if kind == 14:
        zeros = g.op("Mul", g.op("Expand", g.constant(0.0), g.op("Shape", h)), h)
        return g.op("Add", h, zeros)
    return g.op("Add", h, "t")


# ---------------------------------------------------------------- [n, 3, 4] to [n, 3]


def _per_place(g: LossBuilder, scores: str) -> str:
    kind = g.rng.integers(4)
    if kind == 0:
        error = g.op("Sub", scores, "t")
        return g.op("ReduceMean", g.op("Mul", error, error), g.ints(2), keepdims=0)
    logs = g.op("LogSoftmax", scores, axis=2)
    index = g.op("Unsqueeze", "labels", g.ints(2))
    if kind == 1:  # class weights, without their sum
        picked = g.op("Mul", g.op("GatherElements", logs, index, axis=2), g.op("Gather", "classes", index))
        return g.op("Neg", g.op("Squeeze", picked, g.ints(2)))
    return g.op("Neg", g.op("Squeeze", g.op("GatherElements", logs, index, axis=2), g.ints(2)))


# ---------------------------------------------------------------- [n, 3] to a number


def _reduced(g: LossBuilder, v: str) -> str:  # one return per kind of norm
    kind = g.rng.integers(20)
    mean = lambda x: g.op("ReduceMean", x, keepdims=0)  # noqa: E731  # one word
    total = lambda x, *axes: g.op("ReduceSum", x, g.ints(*axes) if axes else "", keepdims=0)  # noqa: E731
    weights = g.op("Unsqueeze", "w", g.ints(1))
    if kind < 3:
        return mean(v)
    if kind == 3:
        return total(v)
    if kind == 4:
        return g.op("Div", total(v), g.op("Cast", g.op("Size", v), to=TensorProto.DOUBLE))
    if kind == 5:
        return g.op("Div", total(v), g.constant(6.0))
    if kind == 6:
        return g.op("Div", total(g.op("Mul", v, "mask")), total("mask"))
    if kind == 7:  # tokens are counted sample by sample
        counts = g.op("Add", total("mask", 1), g.constant(1.0))
        return mean(g.op("Div", total(g.op("Mul", v, "mask"), 1), counts))
    if kind == 8:
        return mean(g.op("Mul", v, weights))
    if kind == 9:
        return g.op("Div", total(g.op("Mul", v, weights)), total("w"))
    if kind == 10:
        picked = g.op("Gather", "classes", "labels")
        return g.op("Div", total(g.op("Mul", v, picked)), total(picked))
    if kind == 11:
        return g.op("Sqrt", mean(g.op("Mul", v, v)))
    if kind == 12:
        return g.op("ReduceMax", total(v, 1), keepdims=0)
    if kind == 13:
        return g.op("ReduceLogSumExp", v, keepdims=0)
    if kind == 14:
        return mean(total(v, 1))
    if kind == 15:
        return total(g.op("ReduceMean", v, g.ints(0), keepdims=0))
    if kind == 16:  # a mean of products of means
        return g.op("ReduceMean", g.op("Mul", g.op("ReduceMean", v, g.ints(0), keepdims=1), v), keepdims=0)
    if kind == 17:
        rows = g.op("Cast", g.op("Shape", v, start=0, end=1), to=TensorProto.DOUBLE)
        return total(g.op("Div", v, g.op("Sqrt", rows) if g.rng.integers(2) else rows))
    if kind == 18:  # per place first: as many in every sample
        return mean(g.op("ReduceMean", v, g.ints(int(g.rng.integers(2))), keepdims=0))
    valid = g.op("Cast", g.op("Not", g.op("Equal", "labels", g.constant(0, np.int64))), to=TensorProto.DOUBLE)
    return g.op("Div", total(g.op("Mul", v, valid)), total(valid))


def _finished(g: LossBuilder, loss: str) -> str:
    kind = g.rng.integers(6)
    if kind == 0:
        decay = g.op("ReduceSumSquare", "W", keepdims=0)
        return g.op("Add", loss, g.op("Mul", decay, g.constant(0.1)))
    if kind == 1:
        return g.op("Mul", loss, g.constant(3.0))
    if kind == 2:
        return g.op("Tanh", loss)
    return loss


# ---------------------------------------------------------------- the truth, by running


def random_batch(rng: np.random.Generator, samples: int) -> dict[str, np.ndarray]:
    """Return data of so many samples."""
    batch = {name: rng.normal(size=(samples, *shape)) for name, shape in DATA.items()}
    batch["mask"] = rng.integers(0, 2, (samples, PLACES)).astype(np.float64)
    batch["mask"][0] = 1.0
    batch["w"] = rng.uniform(0.5, 2.0, samples)
    batch["labels"] = rng.integers(0, CLASSES, (samples, PLACES))
    batch["labels"][0] = 1
    return batch
