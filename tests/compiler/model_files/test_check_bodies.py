"""If, Loop and Scan that do not fit their bodies are refused, and ONNX's checker sees none of it."""

from pathlib import Path

import onnx
import pytest

from tests.checks.command_line import refused
from tests.compiler.differentiation.forward.test_control_flow import CASES, stored

IF, LOOP, SCAN = CASES["If_known"], CASES["Loop"], CASES["Scan"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (IF.replace("then_branch", "then"), "then_branch"),
        (IF.replace("(double[3,4] v) { v = ", "(double[3,4] v, double[3,4] w) { w = Exp (b) v = "),
         "1 outputs, where its else_branch makes it 2"),
        (LOOP.replace("double[3,4] next, double[3,4] out)", "double[3,4] next)"), "2 outputs"),
        (LOOP.replace("Loop (n, t, a)", "Loop (n, t, a, b)"), "inputs"),
        (SCAN.replace("num_scan_inputs = 1", "num_scan_inputs = 3"), "inputs"),
        (SCAN.replace("num_scan_inputs = 1", "num_scan_inputs = 0"), "inputs"),
        (SCAN.replace("= 1,", "= 1, scan_input_axes = [0, 1],"), "2 scan_input_axes"),
        (LOOP.replace("value_int = 3", "value_ints = [3, 4]"), "shape [2]"),
    ],
)  # fmt: skip
def test_a_body_that_does_not_fit_is_refused(tmp_path: Path, text: str, what: str) -> None:
    onnx.save(stored(text), tmp_path / "m.onnx")

    refused(
        "grad",
        tmp_path / "m.onnx",
        "--loss",
        "total",
        "-o",
        tmp_path / "t.onnx",
        what=what,
        at="m.onnx",
        fix="e",
    )


def test_a_constant_without_a_value_is_refused(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[2] x) => (float total) {
            c = Constant <value_float = 2.0> () y = Mul (x, c) total = ReduceSum <keepdims = 0> (y) }"""
    )
    del model.graph.node[0].attribute[:]
    onnx.save(model, tmp_path / "m.onnx")

    grad = ("grad", tmp_path / "m.onnx", "--loss", "total", "-o", tmp_path / "t.onnx")
    refused(*grad, what="0 values", at="m.onnx", fix="one value")


@pytest.mark.parametrize(
    ("outputs", "call", "what"),
    [
        ("unique_ids, gone", "u, s", "no node makes output 'gone'"),
        ("unique_ids, sums", "u, s, v", "3 outputs"),
    ],
)
def test_damaged_functions_and_their_calls_are_refused(
    tmp_path: Path, outputs: str, call: str, what: str
) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21, "partc": 1]>
        g (int64[2] ids, float[2,3] rows) => (float[n,3] s) {{ {call} = partc.SumRows (ids, rows) }}
        <domain: "partc", opset_import: ["": 21]>
        SumRows (ids, rows) => ({outputs}) {{ unique_ids = Identity (ids) sums = Identity (rows) }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")

    grad = ("grad", tmp_path / "m.onnx", "--loss", "s", "-o", tmp_path / "t.onnx")
    refused(*grad, what=what, at="m.onnx", fix="again")
