"""A sum over the batch, divided by the number of samples that the batch had, is refused at another batch."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from partc.compiler.differentiation.forward.rebatch import rebatch
from partc.runtime.errors import UnsupportedModel

Meaning = Callable[[np.ndarray], np.ndarray]
OLD, NEW = 4, 12


def parse(body: str, batch: int | str = OLD) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        test (float[{batch},5] x) => (float loss)
        <int64[1] zero = {{0}}, int64[1] one = {{1}}> {{ {body} }}""")


def batch_of(size: int) -> np.ndarray:
    return np.random.default_rng(size).normal(size=(size, 5)).astype(np.float32)


def loss_of(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return np.asarray(ReferenceEvaluator(model).run(["loss"], {"x": x})[0])


def number(name: str, value: float) -> str:
    return f"{name} = Constant <value_float = {value!r}> ()"


SQUARES = "s = Mul (x, x)"
HELD: dict[str, tuple[str, Meaning]] = {
    "a sum": (
        f"{SQUARES} t = ReduceSum <keepdims = 0> (s) {number('n', 4.0)} loss = Div (t, n)",
        lambda x: (x**2).sum() / len(x),
    ),
    "a sum, by a factor": (
        f"{SQUARES} t = ReduceSum <keepdims = 0> (s) {number('n', 0.25)} loss = Mul (t, n)",
        lambda x: (x**2).sum() / len(x),
    ),
    "a sum of entries": (
        f"t = ReduceL1 <keepdims = 0> (x) {number('n', 20.0)} loss = Div (t, n)",
        lambda x: abs(x).mean(),
    ),
    "a sum of two sums": (
        f"""{SQUARES} t = ReduceSum <keepdims = 0> (s, zero) u = ReduceSum <keepdims = 0> (t)
        {number("n", 20.0)} loss = Div (u, n)""",
        lambda x: (x**2).mean(),
    ),
    "a mean of sums": (
        f"""{SQUARES} t = ReduceSum <keepdims = 0> (s, zero) u = ReduceMean <keepdims = 0> (t)
        {number("n", 4.0)} loss = Div (u, n)""",
        lambda x: (x**2).mean(),
    ),
    "samples in front of their sum": (
        f"""{SQUARES} {number("n", 4.0)} u = Div (s, n) v = Neg (u) loss = ReduceSum <keepdims = 0> (v)""",
        lambda x: -(x**2).sum() / len(x),
    ),
    "a covariance": (
        f"""t = Transpose (x) c = MatMul (t, x) {number("n", 3.0)} d = Div (c, n) e = Mul (d, d)
        loss = ReduceMean <keepdims = 0> (e)""",
        lambda x: ((x.T @ x / (len(x) - 1)) ** 2).mean(),
    ),
    "a covariance by Einsum": (
        f"""c = Einsum <equation = "bi,bj->ij"> (x, x) {number("n", 4.0)} d = Div (c, n) e = Mul (d, d)
        loss = ReduceMean <keepdims = 0> (e)""",
        lambda x: ((x.T @ x / len(x)) ** 2).mean(),
    ),
    "an unbiased variance": (
        f"""m = ReduceMean (x, zero) d = Sub (x, m) q = Mul (d, d) v = ReduceMean <keepdims = 0> (q, zero)
        {number("n", 4 / 3)} u = Mul (v, n) loss = ReduceMean <keepdims = 0> (u)""",
        lambda x: x.var(0, ddof=1).mean(),
    ),
    "a mean made a sum": (
        f"m = ReduceMean <keepdims = 0> (x) {number('n', 4.0)} loss = Mul (m, n)",
        lambda x: len(x) * x.mean(),
    ),
    "a root": (
        f"t = ReduceL2 <keepdims = 0> (x) {number('n', 20**0.5)} loss = Div (t, n)",
        lambda x: (x**2).mean() ** 0.5,
    ),
    "pairs of samples": (
        f"""{SQUARES} e = ReduceSum (s, one) f = Transpose (e) p = Mul (e, f) t = ReduceSum <keepdims = 0> (p)
        {number("n", 16.0)} loss = Div (t, n)""",
        lambda x: np.outer((x**2).sum(1), (x**2).sum(1)).mean(),
    ),
    "a bias of dependence": (
        f"""t = Transpose (x) k = MatMul (x, t) p = Mul (k, k) t2 = ReduceSum <keepdims = 0> (p)
        {number("n", 9.0)} loss = Div (t2, n)""",
        lambda x: ((x @ x.T) ** 2).sum() / (len(x) - 1) ** 2,
    ),
    "a moving mean": (
        f"m = ReduceMean <keepdims = 0> (x) {number('n', 0.75)} loss = Mul (m, n)",
        lambda x: x.mean() * (1 - 1 / len(x)),
    ),
    "a sum beside its count": (
        f"t = ReduceSum <keepdims = 0> (x) {number('n', 4.0)} d = Sub (t, n) loss = Mul (d, d)",
        lambda x: (x.sum() - len(x)) ** 2,
    ),
    "a sum up to its count": (
        f"t = ReduceL1 <keepdims = 0> (x) {number('n', 4.0)} loss = Clip (t, , n)",
        lambda x: np.minimum(abs(x).sum(), len(x)),
    ),
    "a geometric mean": (
        f"e = Exp (x) m = ReduceMean <keepdims = 0> (e) {number('n', 0.25)} loss = Pow (m, n)",
        lambda x: np.exp(x).mean() ** (1 / len(x)),
    ),
    "the logarithm of a mean": (
        f"""e = ReduceMean <keepdims = 0> (x, one) t = ReduceLogSumExp <keepdims = 0> (e)
        {number("n", float(np.log(4.0)))} loss = Sub (t, n)""",
        lambda x: np.log(np.exp(x.mean(1)).mean()),
    ),
}


@pytest.mark.parametrize(("body", "meaning"), HELD.values(), ids=HELD.keys())
def test_a_count_of_the_old_batch_is_refused(body: str, meaning: Meaning) -> None:
    model = parse(body)
    np.testing.assert_allclose(loss_of(model, batch_of(OLD)), meaning(batch_of(OLD)), rtol=1e-5)

    with pytest.raises(UnsupportedModel, match=r"the model's own batch \(4\).* 'n' is") as caught:
        rebatch(model, NEW, {"x": 0})

    assert "symbolic batch" in caught.value.fix


OF_ANY_BATCH: dict[str, tuple[str, Meaning]] = {
    "the weight of a sum": (
        f"{SQUARES} t = ReduceSum <keepdims = 0> (s) {number('n', 0.01)} loss = Mul (t, n)",
        lambda x: 0.01 * (x**2).sum(),
    ),
    "a rounded weight": (
        f"{SQUARES} t = ReduceSum <keepdims = 0> (s) {number('n', 0.333)} loss = Mul (t, n)",
        lambda x: 0.333 * (x**2).sum(),
    ),
    "a mean, halved": (
        f"m = ReduceMean <keepdims = 0> (x) {number('n', 4.0)} loss = Div (m, n)",
        lambda x: x.mean() / 4,
    ),
    "a temperature": (
        f"""{number("n", 4.0)} d = Div (x, n) p = Softmax <axis = 1> (d) q = Mul (p, p)
        loss = ReduceSum <keepdims = 0> (q)""",
        lambda x: ((np.exp(x / 4) / np.exp(x / 4).sum(1, keepdims=True)) ** 2).sum(),
    ),
    "a sum of features": (
        f"""{SQUARES} t = ReduceSum (s, one) {number("n", 4.0)} d = Div (t, n)
        loss = ReduceMean <keepdims = 0> (d)""",
        lambda x: ((x**2).sum(1) / 4).mean(),
    ),
    "a square and a root": (
        f"""m = ReduceMean <keepdims = 0> (x) {number("two", 2.0)} p = Pow (m, two) {number("half", 0.5)}
        loss = Pow (p, half)""",
        lambda x: abs(x.mean()),
    ),
    "a sum from one": (
        f"t = ReduceL1 <keepdims = 0> (x) {number('n', 1.0)} m = Max (t, n) d = Div (t, m) loss = Sub (n, d)",
        lambda x: 1 - abs(x).sum() / max(abs(x).sum(), 1),
    ),
    "a computed count": (
        f"""{SQUARES} t = ReduceSum <keepdims = 0> (s) sizes = Shape <start = 0, end = 1> (x)
        n = Cast <to = 1> (sizes) d = Div (t, n) loss = ReduceSum <keepdims = 0> (d)""",
        lambda x: (x**2).sum() / len(x),
    ),
}


@pytest.mark.parametrize(("body", "meaning"), OF_ANY_BATCH.values(), ids=OF_ANY_BATCH.keys())
@pytest.mark.parametrize("old", [OLD, "n"])
def test_other_numbers_stay(body: str, meaning: Meaning, old: int | str) -> None:
    model = parse(body, old)

    rebatch(model, NEW, {"x": 0})

    x = batch_of(NEW)
    np.testing.assert_allclose(loss_of(model, x), meaning(x), rtol=1e-5)


def test_a_batch_of_one_divides_by_one() -> None:
    """A factor of 1 is a loss's weight, a divisor of 1 a count."""
    divided, weighted = (
        parse(f"t = ReduceSum <keepdims = 0> (x) {number('n', 1.0)} loss = {op} (t, n)", 1)
        for op in ("Div", "Mul")
    )

    rebatch(weighted, NEW, {"x": 0})
    with pytest.raises(UnsupportedModel, match=r"own batch \(1\)"):
        rebatch(divided, NEW, {"x": 0})

    np.testing.assert_allclose(loss_of(weighted, batch_of(NEW)), batch_of(NEW).sum(), rtol=1e-5)
