"""Which standard ops partc differentiates, and how; `partc ops` prints it, docs/operators.md holds it.

rule                a gradient rule of its own (rules/table.py)
expansion           written as ops that have rules, by partc (expansions/table.py, control_flow.py,
                    unpack_sequences.py)
function body       replaced by the function that ONNX defines it as; its ops are covered in turn
non-differentiable  no gradient passes: not float, or flat wherever it is smooth
none                refused, with the node's name and the way to it from a parameter
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import onnx
from onnx.defs import OpSchema

from partc.compiler.differentiation.expansions.table import EXPANSIONS
from partc.compiler.differentiation.forward.bring_forward import OPSET
from partc.compiler.differentiation.forward.unpack_sequences import UNPACKED
from partc.compiler.differentiation.rules.table import CONSTANT_INPUTS, FLAT_OPS, RULES
from partc.compiler.model_files.run_checker import newest_opset

RULE, EXPANSION, FUNCTION, FLAT, NONE = (
    "rule",
    "expansion",
    "function body",
    "non-differentiable",
    "none",
)
FLOAT = "tensor(float)"
UNROLLED = frozenset({"If", "Loop", "Scan"})  # control_flow.py
REGENERATE = "python -m partc.compiler.differentiation.coverage docs/operators.md"


@dataclass(frozen=True, slots=True)
class OpCoverage:
    """How one standard op is differentiated."""

    op_type: str
    since_opset: int
    how: str


def coverage() -> tuple[OpCoverage, ...]:
    """Return how every standard op is differentiated that the installed onnxruntime reads, by name."""
    first: dict[str, int] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            first[schema.name] = min(schema.since_version, first.get(schema.name, schema.since_version))
    newest = newest_opset()
    current = {op_type: _schema(op_type, newest) for op_type, since in first.items() if since <= newest}
    return tuple(
        OpCoverage(op_type, first[op_type], how_differentiated(op_type))
        for op_type, schema in sorted(current.items())
        if not schema.deprecated
    )


@cache
def how_differentiated(op_type: str) -> str:
    """Say how an op is differentiated, in one of the words above."""
    if op_type in RULES:
        return RULE
    if op_type in EXPANSIONS or op_type in UNROLLED | UNPACKED:
        return EXPANSION
    opset = OPSET if onnx.defs.has(op_type, OPSET) else newest_opset()
    schema = _schema(op_type, opset)
    if op_type in FLAT_OPS or not _passes_floats(schema):
        return FLAT
    return FUNCTION if _body_is_covered(schema) else NONE


def _schema(op_type: str, opset: int) -> OpSchema:
    return onnx.defs.get_schema(op_type, opset)


def _passes_floats(schema: OpSchema) -> bool:
    """Tell whether a gradient could arrive and go on."""
    constant = CONSTANT_INPUTS.get(schema.name, frozenset())
    differentiable = [value for index, value in enumerate(schema.inputs) if index not in constant]
    return _some_float(differentiable) and _some_float(schema.outputs)


def _some_float(values: Sequence[OpSchema.FormalParameter]) -> bool:
    return any(FLOAT in kind for value in values for kind in (*value.types, value.type_str))


def _body_is_covered(schema: OpSchema) -> bool:
    """Tell whether ONNX's function has no op that is refused; a body that depends on its node may have.

    Control flow inside is refused: it is unrolled before functions are looked into.
    """
    if not schema.has_function:  # type: ignore[attr-defined]  # onnx's type stubs lack it
        return False
    op_types = {node.op_type for node in schema.function_body.node}
    return not op_types & UNROLLED and NONE not in {how_differentiated(op_type) for op_type in op_types}


# ---------------------------------------------------------------- as text


def coverage_lines(table: Sequence[OpCoverage]) -> list[str]:
    """Return the table as aligned lines, and a line that counts."""
    width = max(len(op.op_type) for op in table)
    lines = [f"{'op':{width}}  since  how"]
    lines += [f"{op.op_type:{width}}  {op.since_opset:5}  {op.how}" for op in table]
    return [*lines, "", summary(table)]


def summary(table: Sequence[OpCoverage]) -> str:
    """Count the ops of each kind."""
    counts = Counter(op.how for op in table)
    kinds = ", ".join(f"{counts[how]} {how}" for how in (RULE, EXPANSION, FUNCTION, FLAT, NONE))
    return f"{len(table)} ops: {kinds}"


def coverage_page(table: Sequence[OpCoverage]) -> str:
    """Return docs/operators.md."""
    rows = "\n".join(f"| {op.op_type} | {op.since_opset} | {op.how} |" for op in table)
    return f"""# Operators

What `partc grad` does with each standard ONNX op, up to opset {newest_opset()} (onnx {onnx.__version__}).
`partc ops` prints this table; `{REGENERATE}` writes this page.

- **rule**: a gradient rule of its own.
- **expansion**: partc writes it as ops that have rules.
- **function body**: replaced by the function that ONNX defines it as, whose ops are covered in turn.
- **non-differentiable**: no gradient passes; its result is not float, or flat wherever it is smooth.
- **none**: refused where a gradient would have to pass. The message names the node and the way to it.

{summary(table)}.

| op | since opset | how |
| --- | --- | --- |
{rows}
"""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(coverage_page(coverage()), encoding="utf-8")
