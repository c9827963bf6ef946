"""Functions whose calls leave attributes out compute inlined what ONNX Runtime computes of them."""

import numpy as np
import onnx
import pytest

from partc.compiler.model_files.open_model import open_model
from partc.passes.graph.inline_functions import inline_local_functions, inline_selected_functions
from partc.runtime.errors import BadModel

X = np.linspace(-2, 2, 16, dtype=np.float32).reshape(4, 4)
HEAD = '<ir_version: 10, opset_import: ["": 21, "my": 1]>'
STEP = "step (float[4,4] x) => (float[4,4] y) { y = my.f (x) }"
IF = """step (float[4,4] x) => (float[4,4] y) <bool true = {1}> {
    y = If (true) <then_branch = yes () => (float[4,4] a) { a = my.f (x) },
                   else_branch = no () => (float[4,4] b) { b = Neg (x) }>
}"""
DOMAIN = '<domain: "my", opset_import: ["": 21, "my": 1]>'
ELU = "f <k: float = 0.25> (x) => (y) { y = Elu <alpha: float = @k> (x) }"
INNER = "inner <k: float = 0.5> (x) => (y) { y = Elu <alpha: float = @k> (x) }"
CASES = {
    "a number": (STEP, ELU),
    "an axis": (STEP, "f <k: int = 0> (x) => (y) { y = Softmax <axis: int = @k> (x) }"),
    "a flag": (STEP, "f <k: int = 1> (x) => (y) { y = Gemm <transB: int = @k> (x, x) }"),
    "numbers": (STEP, "f <k: ints = [0, 1]> (x) => (y) { y = Transpose <perm: ints = @k> (x) }"),
    "a constant": (
        STEP,
        "f <k: float = 3.0> (x) => (y) { c = Constant <value_float: float = @k> () y = Mul (x, c) }",
    ),
    "handed on": (STEP, "f <a: float = 0.25> (x) => (y) { y = my.inner <k: float = @a> (x) }", INNER),
    "called in a function": (STEP, "f (x) => (y) { y = my.inner (x) }", INNER),
    "called in a branch": (IF, ELU),
    "told by the call": (STEP.replace("my.f", "my.f <k = 2.0>"), ELU),
}


def parse(graph: str, *functions: str) -> onnx.ModelProto:
    return onnx.parser.parse_model("\n".join([HEAD, graph, *(f"{DOMAIN} {each}" for each in functions)]))


def run(model: onnx.ModelProto) -> np.ndarray:
    (result,) = open_model(model).run(None, {"x": X})
    return np.asarray(result)


@pytest.mark.parametrize("texts", CASES.values(), ids=CASES.keys())
def test_a_call_has_the_defaults_of_what_it_leaves_out(texts: tuple[str, ...]) -> None:
    model = parse(*texts)
    before = model.SerializeToString(deterministic=True)

    inlined = inline_local_functions(model)

    assert not inlined.functions
    assert np.array_equal(run(inlined), run(model))
    assert model.SerializeToString(deterministic=True) == before


def test_functions_of_an_older_opset_have_their_defaults() -> None:
    model = parse(STEP, ELU)
    model.functions[0].opset_import[0].version = 18

    inlined = inline_local_functions(model, convert_version=True)

    assert [attribute.f for attribute in inlined.graph.node[0].attribute] == [0.25]


def test_a_function_that_is_selected_has_its_defaults() -> None:
    model = parse(*CASES["handed on"])

    inlined = inline_selected_functions(model, [("my", "f")])

    assert [node.op_type for node in inlined.graph.node] == ["inner"]
    assert np.array_equal(run(inlined), run(model))


def test_a_call_that_leaves_out_what_a_constant_is_is_refused() -> None:
    function = "f <k> (x) => (y) { c = Constant <value_float: float = @k> () y = Mul (x, c) }"

    with pytest.raises(BadModel, match=r"(?s)has no value.*fix: give the attribute in the call"):
        inline_local_functions(parse(STEP, function))
