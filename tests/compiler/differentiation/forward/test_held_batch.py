"""What acts on the batch and was written down as a number is refused, where it may be of the old batch.

Each case says in numpy what its graph means at any batch. Refused graphs mean that at their own batch of 4
alone; the others mean it at 12, too.
"""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from partc.compiler.differentiation.forward.rebatch import BatchSize, rebatch
from partc.runtime.errors import UnsupportedModel

Meaning = Callable[[np.ndarray], np.ndarray]
OLD, NEW = 4, 12


def parse(body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 21]>
        test (float[{OLD},6] x) => (float loss) <int64[1] zero = {{0}}, int64[1] one = {{1}}> {{ {body} }}""")


def batch_of(size: int) -> np.ndarray:
    return np.random.default_rng(size).normal(size=(size, 6)).astype(np.float32)


def loss_of(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return np.asarray(ReferenceEvaluator(model).run(["loss"], {"x": x})[0])


def ints(name: str, *values: int) -> str:
    return f"{name} = Constant <value_ints = [{', '.join(map(str, values))}]> ()"


HELD: dict[str, tuple[str, Meaning, str]] = {
    "half by an end": (
        f"""{ints("two", 2)} h = Slice (x, zero, two, zero) s = Mul (h, h)
        loss = ReduceMean <keepdims = 0> (s)""",
        lambda x: (x[: len(x) // 2] ** 2).mean(),
        "an end of 2",
    ),
    "the second of two views": (
        f"""z = Concat <axis = 0> (x, x) {ints("batch", 4)} {ints("far", 2**62)} s = Mul (z, z)
        v = Slice (s, batch, far, zero) loss = ReduceMean <keepdims = 0> (v)""",
        lambda x: (x**2).mean(),
        "a start of 4",
    ),
    "all but a few": (
        f"""{ints("few", -3)} v = Slice (x, zero, few, zero) loss = ReduceMean <keepdims = 0> (v)""",
        lambda x: x[: len(x) // 4].mean(),
        "an end of -3",
    ),
    "one sample of each view": (
        f"""z = Concat <axis = 0> (x, x) {ints("far", 2**62)} {ints("batch", 4)}
        v = Slice (z, zero, far, zero, batch) loss = ReduceMean <keepdims = 0> (v)""",
        lambda x: x[0].mean(),
        "a step of 4",
    ),
    "the harder half": (
        f"""e = ReduceMean <keepdims = 0> (x, one) {ints("two", 2)} v, i = TopK (e, two)
        loss = ReduceMean <keepdims = 0> (v)""",
        lambda x: np.sort(x.mean(1))[len(x) // 2 :].mean(),
        "a count of 2",
    ),
    "the hardest quarter": (
        """e = ReduceMean <keepdims = 0> (x, one) v, i = TopK (e, one)
        loss = ReduceMean <keepdims = 0> (v)""",
        lambda x: np.sort(x.mean(1))[-(len(x) // 4) :].mean(),
        "a count of 1",
    ),
    "the last sample by its number": (
        f"""{ints("last", 3)} v = Gather <axis = 0> (x, last) loss = ReduceMean <keepdims = 0> (v)""",
        lambda x: x[-1].mean(),
        "positions of 3",
    ),
    "samples by their numbers": (
        f"""{ints("order", 3, 2, 1, 0)} v = Gather <axis = 0> (x, order)
        loss = ReduceMean <keepdims = 0> (v)""",
        lambda x: x.mean(),
        "positions of",
    ),
    "pairs of samples and columns": (
        """places = Constant <value = int64[4,2] {0,0, 1,1, 2,2, 3,3}> () v = GatherND (x, places)
        loss = ReduceMean <keepdims = 0> (v)""",
        lambda x: x[np.arange(len(x)), np.arange(len(x)) % 6].mean(),
        "positions of",
    ),
    "labels of all samples": (
        """labels = Constant <value = int64[4,1] {0, 1, 2, 3}> () t = Transpose (x) k = MatMul (x, t)
        v = GatherElements <axis = 1> (k, labels) loss = ReduceMean <keepdims = 0> (v)""",
        lambda x: (x**2).sum(1).mean(),
        "is held in 'labels'",
    ),
    "a mask of samples": (
        """mask = Constant <value = bool[4] {1, 1, 0, 0}> () v = Compress <axis = 0> (x, mask)
        loss = ReduceMean <keepdims = 0> (v)""",
        lambda x: x[: len(x) // 2].mean(),
        "a mask of",
    ),
    "as many samples again": (
        f"""{ints("pads", 0, 0, 4, 0)} v = Pad (x, pads) loss = ReduceMean <keepdims = 0> (v)""",
        lambda x: x.mean() / 2,
        "padding of 4",
    ),
    "a part for each sample": (
        """a, b, c, d = Split <axis = 0, num_outputs = 4> (x) s = Mul (a, b)
        loss = ReduceMean <keepdims = 0> (s)""",
        lambda x: (x[0] * x[1]).mean(),
        "a number of parts",
    ),
    "each sample with each": (
        f"""{ints("copies", 4, 1)} v = Tile (x, copies) s = Mul (v, v) loss = ReduceSum <keepdims = 0> (s)""",
        lambda x: len(x) * (x**2).sum(),
        "a number of copies",
    ),
    "copies": (
        f"""r = Unsqueeze (x, zero) {ints("copies", 4, 1, 1)} v = Expand (r, copies) s = Mul (v, v)
        u = ReduceSum <keepdims = 0> (s, zero) loss = ReduceMean <keepdims = 0> (u)""",
        lambda x: len(x) * (x**2).mean(),
        "has as many copies",
    ),
    "copies beside the batch": (
        f"""r = Unsqueeze (x, one) {ints("copies", 4, 4, 6)} v = Expand (r, copies) a = Abs (v)
        u = ReduceSum <keepdims = 0> (a, one) loss = ReduceMean <keepdims = 0> (u)""",
        lambda x: len(x) * abs(x).mean(),
        "has as many copies",
    ),
    "copies of new axes": (
        f"""{ints("copies", 4, 1, 1)} v = Expand (x, copies) loss = ReduceL1 <keepdims = 0> (v)""",
        lambda x: len(x) * abs(x).sum(),
        "has as many copies",
    ),
    "copies, computed": (
        f"""{ints("minus", -1, -1, 4, -1)} {ints("far", 2**62)} asked = Slice (minus, one, far, zero)
        sizes = Shape (asked) ones = ConstantOfShape <value = int64[1] {{1}}> (sizes) keep = Neg (ones)
        kept = Equal (asked, keep) copies = Where (kept, ones, asked)
        r = Unsqueeze (x, one) v = Expand (r, copies) loss = ReduceSum <keepdims = 0> (v)""",
        lambda x: len(x) * x.sum(),
        "has as many copies",
    ),
    "tiles": (
        f"""r = Unsqueeze (x, one) {ints("copies", 1, 4, 1)} v = Tile (r, copies)
        loss = ReduceSum <keepdims = 0> (v)""",
        lambda x: len(x) * x.sum(),
        "has as many copies",
    ),
    "a size of images": (
        f"""{ints("axes", 1, 2)} images = Unsqueeze (x, axes) {ints("size", 4, 1, 1, 12)}
        v = Resize <mode = "nearest"> (images, , , size) loss = ReduceMean <keepdims = 0> (v)""",
        lambda x: x.mean(),
        "a size of",
    ),
    "pairs of far samples": (
        """two = Constant <value_int = 2> () t = Transpose (x) k = MatMul (x, t) v = Trilu (k, two)
        loss = ReduceMean <keepdims = 0> (v)""",
        lambda x: np.triu(x @ x.T, len(x) // 2).mean(),
        "a diagonal of 2",
    ),
}


@pytest.mark.parametrize(("body", "meaning", "what"), HELD.values(), ids=HELD.keys())
@pytest.mark.parametrize("batch", [NEW, "dynamic"])
def test_a_constant_that_may_hold_the_batch_is_refused(
    body: str, meaning: Meaning, what: str, batch: BatchSize
) -> None:
    model = parse(body)
    x = batch_of(OLD)
    np.testing.assert_allclose(loss_of(model, x), meaning(x), rtol=1e-5)

    with pytest.raises(UnsupportedModel, match=r"the model's own batch \(4\)") as caught:
        rebatch(model, batch, {"x": 0})

    assert what in caught.value.what
    assert "symbolic batch" in caught.value.fix


OF_ANY_BATCH: dict[str, tuple[str, Meaning]] = {
    "differences": (
        f"""{ints("end", -1)} {ints("far", 2**62)} a = Slice (x, one, far, zero)
        b = Slice (x, zero, end, zero) d = Sub (a, b) s = Mul (d, d) loss = ReduceMean <keepdims = 0> (s)""",
        lambda x: ((x[1:] - x[:-1]) ** 2).mean(),
    ),
    "backwards": (
        f"""{ints("end", -1)} {ints("far", -(2**62))} r = Slice (x, end, far, zero, end) s = Mul (r, x)
        loss = ReduceMean <keepdims = 0> (s)""",
        lambda x: (x[::-1] * x).mean(),
    ),
    "every other sample": (
        f"""{ints("far", 2**62)} {ints("two", 2)} r = Slice (x, zero, far, zero, two)
        loss = ReduceMean <keepdims = 0> (r)""",
        lambda x: x[::2].mean(),
    ),
    "the first sample and the last": (
        """first = Constant <value_int = 0> () last = Constant <value_int = -1> ()
        a = Gather <axis = 0> (x, first) b = Gather <axis = 0> (x, last) s = Mul (a, b)
        loss = ReduceMean <keepdims = 0> (s)""",
        lambda x: (x[0] * x[-1]).mean(),
    ),
    "a mean of copies": (
        f"""r = Unsqueeze (x, zero) {ints("copies", 4, 1, 1)} v = Expand (r, copies) s = Mul (v, v)
        u = ReduceMean <keepdims = 0> (s, zero) loss = ReduceSum <keepdims = 0> (u)""",
        lambda x: (x**2).sum(),
    ),
    "other copies": (
        f"""r = Unsqueeze (x, zero) {ints("copies", 3, 1, 1)} v = Expand (r, copies)
        loss = ReduceSum <keepdims = 0> (v)""",
        lambda x: 3 * x.sum(),
    ),
    "columns": (
        f"""{ints("three", 3)} {ints("four", 4)} a = Slice (x, one, four, one)
        b, i = TopK <axis = 1> (x, three) s = Mul (a, b) loss = ReduceMean <keepdims = 0> (s)""",
        lambda x: (x[:, 1:4] * -np.sort(-x, 1)[:, :3]).mean(),
    ),
    "halves": (
        """a, b = Split <axis = 0, num_outputs = 2> (x) s = Mul (a, a)
        loss = ReduceMean <keepdims = 0> (s)""",
        lambda x: (x[: len(x) // 2] ** 2).mean(),
    ),
}


@pytest.mark.parametrize(("body", "meaning"), OF_ANY_BATCH.values(), ids=OF_ANY_BATCH.keys())
def test_what_any_batch_has_stays(body: str, meaning: Meaning) -> None:
    model = parse(body)

    rebatch(model, NEW, {"x": 0})

    x = batch_of(NEW)
    np.testing.assert_allclose(loss_of(model, x), meaning(x), rtol=1e-5)


def test_the_only_sample_may_be_all_of_them() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        test (float[1,6] x) => (float loss) {
            first = Constant <value_int = 0> () v = Gather <axis = 0> (x, first)
            loss = ReduceMean <keepdims = 0> (v) }""")

    with pytest.raises(UnsupportedModel, match=r"the model's own batch \(1\).* positions of 0"):
        rebatch(model, NEW, {"x": 0})


def test_half_of_a_few_samples_may_be_one() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        test (float[3,6] x) => (float loss) <int64[1] zero = {0}, int64[1] one = {1}> {
            v = Slice (x, zero, one, zero) loss = ReduceMean <keepdims = 0> (v) }""")

    with pytest.raises(UnsupportedModel, match="an end of 1"):
        rebatch(model, NEW, {"x": 0})


def test_the_batch_that_a_model_has_is_no_change() -> None:
    body, meaning, _ = HELD["the harder half"]
    model = parse(body)

    rebatch(model, OLD, {"x": 0})

    np.testing.assert_allclose(loss_of(model, batch_of(OLD)), meaning(batch_of(OLD)), rtol=1e-5)
