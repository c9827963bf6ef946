"""If, Loop and Scan with their branches and bodies: as many inputs and outputs as the ops define.

    If     outputs = outputs of each branch; a branch has no inputs
    Loop   inputs M, condition, N values; body (iteration, condition, N) -> (condition, N, K); outputs N + K
    Scan   inputs N + M, M of them scanned; body (N + M) -> (N + K); outputs N + K

ONNX's checker compares none of them, and lets a Constant have no value. Opset 8's Scan reads the sequences'
lengths before all else.
"""

from collections.abc import Callable

import onnx

from partc.runtime.errors import BadModel

_Wanted = list[tuple[str, int, int]]  # what, how many there are, how many there must be


def check_bodies(node: onnx.NodeProto, version: int, at: str) -> None:
    """Raise BadModel where a node and its bodies do not fit. `version`: of the standard ops."""
    if node.domain not in ("", "ai.onnx"):
        return
    if node.op_type == "Constant" and len(node.attribute) != 1:
        raise BadModel(f"{len(node.attribute)} values", at=at, fix="give the Constant one value")
    if node.op_type not in _RULES:
        return
    bodies = {attribute.name: attribute.g for attribute in node.attribute if attribute.HasField("g")}
    names = ("then_branch", "else_branch") if node.op_type == "If" else ("body",)
    if missing := [name for name in names if name not in bodies]:
        raise BadModel(f"no {missing[0]}", at=at, fix=f"give the {node.op_type} its {missing[0]}")
    for name in names:
        for what, actual, expected in _RULES[node.op_type](node, bodies[name], version):
            if actual != expected:
                raise BadModel(
                    f"{actual} {what}, where its {name} makes it {expected}",
                    at=at,
                    fix=f"let the {node.op_type} and its {name} agree, or export the model again",
                )


def _if(node: onnx.NodeProto, branch: onnx.GraphProto, version: int) -> _Wanted:
    return [("outputs", len(node.output), len(branch.output)), ("inputs of a branch", len(branch.input), 0)]


def _loop(node: onnx.NodeProto, body: onnx.GraphProto, version: int) -> _Wanted:
    states = max(0, len(node.input) - 2)
    return [
        ("inputs", max(2, len(node.input)), len(body.input)),
        ("outputs", len(node.output), len(body.output) - 1),
        ("carried values with a next value", min(states, len(body.output) - 1), states),
    ]


def _scan(node: onnx.NodeProto, body: onnx.GraphProto, version: int) -> _Wanted:
    lists = {attribute.name: len(attribute.ints) for attribute in node.attribute}
    scanned = next((a.i for a in node.attribute if a.name == "num_scan_inputs"), 0)
    inputs = len(node.input) - (1 if version < 9 else 0)
    states = inputs - scanned
    expected = {"input": scanned, "output": len(body.output) - states}
    return [
        ("inputs", inputs, len(body.input)),
        ("outputs", len(node.output), len(body.output)),
        ("scanned inputs", min(max(scanned, 1), inputs), scanned),
        ("carried values with a next value", min(states, len(body.output)), states),
        *(
            (name, lists.get(name, count), count)
            for way, count in expected.items()
            for name in (f"scan_{way}_axes", f"scan_{way}_directions", "directions" if way == "input" else "")
        ),
    ]


_RULES: dict[str, Callable[[onnx.NodeProto, onnx.GraphProto, int], _Wanted]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
}
