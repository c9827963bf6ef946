"""Gradients of broadcasting ops whose sizes only the running step knows, against central differences.

Every operand is a slice of a parameter whose ends are data: shape inference knows its rank, and not one
of its sizes. Each drawn graph runs with several sizes, 1 among them on axes that are broadcast.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from tests.checks.training_steps import EVERYTHING, session, train
from tests.sampling import sampled

Shape = tuple[int, ...]
GRAPHS = 8  # of every kind of op, each run at RUNS sizes
OFTEN = 4  # of them, but in make test-all
RUNS = 3

# Op -> the nodes that make y of the operands; C is a condition that broadcasts with them.
ELEMENTWISE = {
    "Add": "y = Add (a, b)",
    "Sub": "y = Sub (a, b)",
    "Mul": "y = Mul (a, b)",
    "Div": "e = Exp (b) y = Div (a, e)",
    "Pow": "p = Exp (a) y = Pow (p, b)",
    "Mod": "e = Exp (b) y = Mod <fmod = 1> (a, e)",
    "Max": "y = Max (a, b, c)",
    "Min": "y = Min (a, b, c)",
    "Sum": "y = Sum (a, b, c)",
    "Where": "zero = Constant <value = double {0}> () m = Greater (c, zero) y = Where (m, a, b)",
    "Clip": "l = Constant <value = double {-0.4}> () h = Constant <value = double {0.5}> () "
    "d = Add (a, b) y = Clip (d, l, h)",
    "Expand": "s = Shape (b) t = Expand (a, s) y = Mul (t, b)",
}
PRODUCTS = {
    "MatMul": "y = MatMul (a, b)",
    "Gemm": "y = Gemm <alpha = 0.5, beta = 2.0> (a, b, c)",
    "Einsum": 'y = Einsum <equation = "...ij,...jk->...ik"> (a, b)',
}


@dataclass(frozen=True)
class Case:
    """A graph whose parameters have the largest shapes, and the sizes of its runs."""

    body: str
    widest: tuple[Shape, ...]
    runs: tuple[tuple[Shape, ...], ...]

    @property
    def names(self) -> Sequence[str]:
        return "abc"[: len(self.widest)]

    def model(self) -> onnx.ModelProto:
        slices = " ".join(f"{x} = Slice (P{x}, Z{x}, n{x})" for x in self.names)
        zeros = " ".join(
            f"Z{x} = Constant <value_ints = [{','.join('0' for _ in shape)}]> ()"
            for x, shape in zip(self.names, self.widest, strict=True)
        )
        inputs = ", ".join(
            f"int64[{len(shape)}] n{x}" for x, shape in zip(self.names, self.widest, strict=True)
        )
        parameters = ", ".join(
            f"double[{','.join(map(str, shape))}] P{x}"
            for x, shape in zip(self.names, self.widest, strict=True)
        )
        text = f"""<ir_version: 10, opset_import: ["": 21]> g ({inputs}) => (double total) <{parameters}> {{
            {zeros} {slices} {self.body} {WEIGHTED_SUM} }}"""
        model = onnx.parser.parse_model(text)
        rng = np.random.default_rng(len(self.body))
        model.graph.initializer.extend(
            numpy_helper.from_array(rng.normal(size=shape), f"P{x}")
            for x, shape in zip(self.names, self.widest, strict=True)
        )
        return model


# No gradient is symmetric by luck: entry i of y weighs cos i.
WEIGHTED_SUM = """
    yshape = Shape (y) count = Size (y) first = Constant <value_int = 0> () step = Constant <value_int = 1> ()
    places = Range (first, count, step) angles = Cast <to = 11> (places) waves = Cos (angles)
    weights = Reshape (waves, yshape) weighted = Mul (y, weights) total = ReduceSum <keepdims = 0> (weighted)
"""


def narrowed(rng: np.random.Generator, shape: Shape) -> Shape:
    """Return a shape that broadcasts to this one: some axes 1, some of the first left out."""
    sizes = [1 if rng.random() < 0.4 else size for size in shape]
    return tuple(sizes[rng.integers(0, len(sizes) + 1) if rng.random() < 0.3 else 0 :])


def elementwise_case(rng: np.random.Generator, body: str, operands: int) -> Case:
    ranks = [int(rng.integers(1, 4)) for _ in range(operands)]
    runs = []
    for _ in range(RUNS):
        whole = rng.integers(1, 4, max(ranks))
        runs.append(
            tuple(
                tuple(int(n) if rng.random() < 0.6 else 1 for n in whole[len(whole) - rank :])
                for rank in ranks
            )
        )
    return Case(body, tuple((3,) * rank for rank in ranks), tuple(runs))


def product_case(rng: np.random.Generator, op_type: str) -> Case:
    batch = [0, 0] if op_type == "Gemm" else rng.integers(0, 3, 2).tolist()
    if op_type == "Einsum":  # ONNX's inference wants ellipses of one length
        batch[1] = batch[0]
    runs = []
    for _ in range(RUNS):
        m, k, n = rng.integers(1, 4, 3).tolist()
        whole = rng.integers(1, 4, 2).tolist()
        shapes = [
            (*(size if rng.random() < 0.6 else 1 for size in whole[2 - count :]), *matrix)
            for count, matrix in zip(batch, ((m, k), (k, n)), strict=True)
        ]
        if op_type == "Gemm":
            shapes.append((m if rng.random() < 0.5 else 1, n if rng.random() < 0.5 else 1))
        runs.append(tuple(shapes))
    return Case(PRODUCTS[op_type], tuple((3,) * len(shape) for shape in runs[0]), tuple(runs))


def drawn_case(op_type: str, seed: int) -> Case:
    rng = np.random.default_rng([seed, *op_type.encode()])
    if op_type in PRODUCTS:
        return product_case(rng, op_type)
    return elementwise_case(
        rng, ELEMENTWISE[op_type], 3 if "c)" in ELEMENTWISE[op_type] or "(c," in ELEMENTWISE[op_type] else 2
    )


@pytest.mark.parametrize("seeds", sampled([range(OFTEN), range(OFTEN, GRAPHS)], range(1)), ids=str)
@pytest.mark.parametrize("op_type", [*ELEMENTWISE, *PRODUCTS])
def test_gradient_at_sizes_that_only_the_step_knows(op_type: str, seeds: range) -> None:
    for seed in seeds:
        case = drawn_case(op_type, seed)
        model = case.model()
        trained = build_training_graph(model, loss="total", optimizer=SGD(lr=1.0), parameters=EVERYTHING)
        for shapes in case.runs:
            feeds = {f"n{x}": np.array(shape, np.int64) for x, shape in zip(case.names, shapes, strict=True)}
            check_gradients(model, trained, feeds, f"{op_type} {seed} {shapes}")


def with_parameters(text: str, names: str) -> onnx.ModelProto:
    """Make inputs of these names initializers of random values."""
    model = onnx.parser.parse_model(text)
    rng, kept = np.random.default_rng(7), []
    for value in model.graph.input:
        if value.name not in names:
            kept.append(value)
            continue
        shape = [size.dim_value for size in value.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        array = rng.normal(size=shape).astype(dtype)
        model.graph.initializer.append(numpy_helper.from_array(array, value.name))
    del model.graph.input[:]
    model.graph.input.extend(kept)
    return model


def check_gradients(
    model: onnx.ModelProto,
    trained: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
    what: str,
    batch: int | None = None,
) -> None:
    """Compare one step of SGD with central differences; `batch` is the first size of all data."""
    for value in model.graph.input if batch else ():
        value.type.tensor_type.shape.dim[0].dim_value = batch
    start = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    _, after = train(trained, [feeds])
    for name, value in start.items():
        if name not in after:  # the condition of a Where
            continue
        expected = central_differences(model, start, feeds, name)
        np.testing.assert_allclose(value - after[name], expected, rtol=2e-6, atol=2e-6, err_msg=what)


def central_differences(
    model: onnx.ModelProto, start: Mapping[str, np.ndarray], feeds: Mapping[str, np.ndarray], name: str
) -> np.ndarray:
    free = onnx.ModelProto()
    free.CopyFrom(model)
    del free.graph.initializer[:]
    free.graph.input.extend(
        helper.make_tensor_value_info(key, TensorProto.DOUBLE, value.shape) for key, value in start.items()
    )
    forward = session(free)

    def total(moved: np.ndarray) -> float:
        return float(forward.run(["total"], {**start, **feeds, name: moved})[0])

    slopes, step = np.zeros(start[name].shape), 1e-6
    for position in np.ndindex(slopes.shape):
        shift = np.zeros(slopes.shape)
        shift[position] = step
        slopes[position] = (total(start[name] + shift) - total(start[name] - shift)) / (2 * step)
    return slopes
