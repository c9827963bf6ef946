"""The table of what partc differentiates: true, and the same in docs/ and on the command line."""

from pathlib import Path

import onnx
import pytest

from partc.compiler.differentiation import coverage as table
from partc.compiler.differentiation.coverage import FLAT, FUNCTION, NONE, RULE, coverage, coverage_page
from partc.compiler.differentiation.rules.table import CONSTANT_INPUTS, RULES
from partc.compiler.model_files.run_checker import newest_opset
from tests.checks.command_line import done

PAGE = Path(__file__).parents[3] / "docs" / "operators.md"


def test_the_page_is_what_the_table_says() -> None:
    if f"up to opset {newest_opset()} (onnx {onnx.__version__})" not in PAGE.read_text(encoding="utf-8"):
        pytest.skip("the page was written with other versions of onnx and onnxruntime")
    assert PAGE.read_text(encoding="utf-8") == coverage_page(coverage()), f"run {table.REGENERATE}"


@pytest.mark.parametrize(
    ("op_type", "how"),
    [("MatMul", RULE), ("Swish", FUNCTION), ("Equal", FLAT), ("Round", FLAT), ("RoiAlign", NONE)],
)
def test_an_op_is_listed_with_how_it_is_differentiated(op_type: str, how: str) -> None:
    assert {op.op_type: op.how for op in coverage()}[op_type] == how


def test_an_op_is_listed_with_the_opset_that_introduced_it() -> None:
    assert {op.op_type: op.since_opset for op in coverage()}["Gelu"] == 20


def test_the_command_prints_the_table_and_counts_it() -> None:
    lines = done("ops").splitlines()

    assert ["Einsum", "12", RULE] in [line.split() for line in lines]
    assert f"{len(coverage())} ops: " in lines[-1]


def test_inputs_that_onnx_calls_non_differentiable_are_constants_to_us() -> None:
    stray = {
        (schema.name, value.name)
        for schema in onnx.defs.get_all_schemas()
        if schema.domain == "" and schema.name in RULES
        for index, value in enumerate(schema.inputs)
        if value.differentiation_category == onnx.defs.OpSchema.DifferentiationCategory.NonDifferentiable
        and "tensor(float)" in value.types
        and index not in CONSTANT_INPUTS.get(schema.name, ())
    }
    assert stray == {("Mod", "B")}  # a mod b changes with b: PyTorch differentiates it too
