"""What a rewriting of segments adds has names of its own, however often it applies and whatever is there."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from onnx import helper, parser, shape_inference

from partc.passes.cpu_kernels import block_updates as blocking
from partc.passes.cpu_kernels.align_scalars import align_scalars
from partc.passes.cpu_kernels.block_updates import block_updates
from partc.passes.cpu_kernels.gather_samples import gather_samples
from partc.passes.cpu_kernels.segment_values import FreshNames, images_of
from partc.passes.cpu_kernels.transpose_products import transpose_products
from partc.passes.cpu_kernels.winograd import tile_convolutions
from tests.builders.graphs.rewritten_models import named, run

Rewrite = Callable[[onnx.ModelProto, onnx.ModelProto], object]


@dataclass(frozen=True)
class Case:
    """A rewriting, and a model to which it applies several times in a row."""

    name: str
    rewrite: Rewrite
    text: str

    def __str__(self) -> str:
        return self.name


CASES = [
    Case(
        "gather_samples",
        lambda model, typed: gather_samples(model, images_of(typed.graph)),
        """(float[8,256,7,7] x, float[512,256,1,1] V, float[512,512,1,1] W) => (float[8,512,7,7] z) {
            y1 = Conv (x, V) y2 = Conv (y1, W) y3 = Conv (y2, W) z = Conv (y3, W) }""",
    ),
    Case(
        "tile_convolutions",
        lambda model, typed: tile_convolutions(model, images_of(typed.graph)),
        """(float[4,64,16,16] x, float[64,64,3,3] W) => (float[4,64,16,16] z) {
            y1 = Conv <pads = [1,1,1,1]> (x, W) y2 = Conv <pads = [1,1,1,1]> (y1, W)
            z = Conv <pads = [1,1,1,1]> (y2, W) }""",
    ),
    Case(
        "transpose_products",
        transpose_products,
        """(float[16,1024] h, float[1024,1024] W) => (float[16,1024] z) {
            h1 = MatMul (h, W) h2 = MatMul (h1, W) h3 = MatMul (h2, W) h4 = MatMul (h3, W) z = MatMul (h4, W)
        }""",
    ),
    Case(
        "align_scalars",
        align_scalars,
        """(float[4,3,1,1] W, float r) => (float[4,3,1,1] z) <float keep = {0.9}> {
            a = Mul (keep, W) twice = Add (r, r) b = Sub (a, twice) c = Mul (keep, b) z = Sub (c, twice) }""",
    ),
    Case(
        "block_updates",
        lambda model, typed: block_updates(model, typed, {"w2", "m2"}),
        """(float[6,8] w, float[6,8] m, float[6,8] g) => (float[6,8] w2, float[6,8] m2, float[8,6] t) {
            a = Mul (w, g) b = Mul (a, g) c = Mul (b, g) w2 = Sub (c, g)
            d = Mul (m, g) e = Mul (d, g) f = Mul (e, g) m2 = Sub (f, g) t = Transpose (m2) }""",
    ),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LEAST_ELEMENTS", 48), ("MOST_IN_BLOCK", 24), ("LEAST_IN_BLOCK", 1)):
        monkeypatch.setattr(blocking, name, value)


def rewritten(model: onnx.ModelProto, rewrite: Rewrite) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    rewrite(result, shape_inference.infer_shapes(model))
    return result


def value_names(graph: onnx.GraphProto) -> list[str]:
    given = [value.name for value in (*graph.input, *graph.initializer)]
    return given + [name for node in graph.node for name in node.output]


def every_name(graph: onnx.GraphProto) -> Iterator[str]:
    yield from value_names(graph)
    for node in graph.node:
        yield node.name
        for attribute in node.attribute:
            yield from every_name(attribute.g)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_added_names_are_unique_even_where_the_model_has_them_already(case: Case) -> None:
    model = named(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> step {case.text}'))
    for index, node in enumerate(model.graph.node):
        node.name = f"n{index}"
    added = sorted(set(every_name(rewritten(model, case.rewrite).graph)) - set(every_name(model.graph)))
    assert added
    for name in added:  # a second author who likes the same names
        node = helper.make_node("Identity", [model.graph.input[0].name], [name], name=f"{name}/shape")
        model.graph.node.append(node)
        model.graph.output.append(model.graph.input[0])
        model.graph.output[-1].name = name

    result = rewritten(model, case.rewrite)

    assert len(result.graph.node) > len(model.graph.node) or case.name == "block_updates"
    for names in (value_names(result.graph), [node.name for node in result.graph.node]):
        assert len(names) == len(set(names))
    onnx.checker.check_model(result, full_check=True)
    for found, expected in zip(run(result), run(model), strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=0, atol=1e-5 * scale)


def test_a_name_is_given_once() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> step (float[2] x) => (float[2] y) { y = Neg (x) }'
    )
    names = FreshNames(model.graph)

    assert [names.fresh(hint) for hint in ("x", "z", "z", "y", "x")] == ["x_1", "z", "z_1", "y_1", "x_2"]
