"""A model that imports one operator set several times has one meaning, or is refused."""

from pathlib import Path

import onnx
import pytest
from onnx import parser

from partc.compiler.importing.merge_opsets import merge_opsets
from partc.compiler.model_files.model_file import read_model
from partc.runtime.errors import BadModel

ADDED = "(float[2,3] x) => (float[2,3] y) { a = Add (x, x) b = Cast <to = 1> (a) y = Relu (b) }"
SOFTENED = "(float[2,3,4] x) => (float[2,3,4] y) { y = Softmax (x) }"  # over the last axis from 13 on
OF_OLD = "(float[2,3] x) => (float[2] y) { y = ReduceSum <axes = [1], keepdims = 0> (x) }"
OF_NEW = "(float[2,3] x) => (float[2] y) <int64[1] axes = {1}> { y = ReduceSum <keepdims = 0> (x, axes) }"
OF_NEITHER = OF_NEW.replace("keepdims = 0", "axes = [1]")
IN_A_BODY = """(bool c, float[2,3,4] x) => (float[2,3,4] y) { y = If (c) <
    then_branch = g1 () => (float[2,3,4] y1) { y1 = Softmax (x) },
    else_branch = g2 () => (float[2,3,4] y2) { y2 = Relu (x) }> }"""


def importing(text: str, *opsets: tuple[str, int]) -> onnx.ModelProto:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 12]> g {text}')
    del model.opset_import[:]
    model.opset_import.extend(onnx.helper.make_opsetid(domain, version) for domain, version in opsets)
    return model


def versions(model: onnx.ModelProto) -> list[tuple[str, int]]:
    return [(opset.domain, opset.version) for opset in model.opset_import]


@pytest.mark.parametrize(
    ("text", "opsets", "expected"),
    [
        (SOFTENED, [("", 19), ("ai.onnx", 19)], 19),
        (SOFTENED, [("", 12), ("", 19)], 19),  # the highest is the last
        (ADDED, [("", 19), ("", 19), ("", 12)], 19),
        (OF_OLD, [("", 19), ("", 12)], 12),
        (OF_NEW, [("", 19), ("", 12)], 19),
    ],
    ids="spellings ascending alike old new".split(),
)
def test_repeated_imports_are_one_where_the_meaning_is(
    text: str, opsets: list[tuple[str, int]], expected: int
) -> None:
    model = importing(text, *opsets, ("com.example", 1))

    merge_opsets(model)

    assert versions(model) == [("", expected), ("com.example", 1)]


@pytest.mark.parametrize("text", [SOFTENED, OF_NEITHER, IN_A_BODY], ids="means fits body".split())
def test_versions_of_different_meaning_are_refused(text: str) -> None:
    with pytest.raises(BadModel, match=r"(?s)imported as 19 and 12.*fix: keep one"):
        merge_opsets(importing(text, ("", 19), ("", 12)))


def test_files_and_functions_are_read_so(tmp_path: Path) -> None:
    model = importing(ADDED, ("", 19), ("ai.onnx", 19), ("", 12))
    function = onnx.helper.make_function(
        "own", "F", ["x"], ["y"], [], [onnx.helper.make_opsetid("", v) for v in (18, 18)]
    )
    model.functions.append(function)
    path = tmp_path / "repeated.onnx"
    path.write_bytes(model.SerializeToString())

    read = read_model(path)

    assert versions(read) == [("", 19)]
    assert [opset.version for opset in read.functions[0].opset_import] == [18]


def test_a_model_that_imports_each_set_once_stays_as_it_is() -> None:
    model = importing(ADDED, ("ai.onnx", 12), ("com.example", 3))

    merge_opsets(model)

    assert versions(model) == [("ai.onnx", 12), ("com.example", 3)]
