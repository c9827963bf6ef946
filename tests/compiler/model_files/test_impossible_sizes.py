"""Small files that ask for more memory than there is: refused or answered, without taking it."""

from pathlib import Path

import onnx
import pytest

from tests.builders.graphs.foreign_steps import parse
from tests.checks.command_line import partc, refused
from tests.checks.peak_memory import peak_of_block

pytestmark = pytest.mark.forks


@pytest.mark.parametrize(
    "big",
    [
        "big = Range (zero, many, one)",
        "big = ConstantOfShape (wide)",
        "wide_one = Unsqueeze (one, first) big = Expand (wide_one, wide)",
        "wide_one = Unsqueeze (one, first) big = Tile (wide_one, wide)",
        "r = Range (zero, many, one) first_of = Gather (r, one) big = Add (r, first_of)",
    ],
)
def test_what_constants_make_is_measured_before_it_is_made(tmp_path: Path, big: str) -> None:
    """The value of `big` is wanted: an If asks for its first element."""
    model = parse(f"""
        g (float[4,3] x) => (float loss)
        <int64 zero = {{0}}, int64 one = {{1}}, int64 many = {{{1 << 40}}}, int64[1] wide = {{{1 << 40}}},
         int64[1] first = {{0}}, float[3] W = {{1, 2, 3}}> {{
            {big}
            at = Gather (big, zero) seen = ReduceMax <keepdims = 0> (at) t = Equal (seen, one)
            y = If (t) <then_branch = g1 () => (float[4,3] u) {{ u = Mul (x, W) }},
                        else_branch = g2 () => (float[4,3] v) {{ v = Add (x, W) }}>
            loss = ReduceMean <keepdims = 0> (y)
        }}""")
    onnx.save(model, tmp_path / "m.onnx")

    with peak_of_block() as peak:
        answer = partc("grad", tmp_path / "m.onnx", "--loss", "loss", "-o", tmp_path / "t.onnx")

    assert answer.code in (0, 2), answer.error
    assert "internal" not in answer.error
    assert peak.grown_bytes < 2e9


def test_a_loop_of_a_million_million_steps_is_refused(tmp_path: Path) -> None:
    model = parse(f"""
        g (float[4,3] x) => (float loss) <int64 many = {{{1 << 40}}}, float[3] W = {{1, 2, 3}}> {{
            t = Constant <value = bool {{1}}> ()
            y = Loop (many, t, x) <body = b (int64 i, bool go, float[4,3] h) => (bool more, float[4,3] next)
                {{ more = Identity (go) next = Mul (h, W) }}>
            loss = ReduceMean <keepdims = 0> (y)
        }}""")
    onnx.save(model, tmp_path / "m.onnx")

    refused(
        "grad", tmp_path / "m.onnx", "--loss", "loss", "-o", tmp_path / "t.onnx", what="4096", fix="fixed"
    )
