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
