"""Names that pair up are proposed as bindings, ready to paste; nothing is adopted."""

import re

import pytest
from onnx import parser

from partc.compiler.commands.arguments.parse_options import parse_pairs
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.importing.propose_state import propose_state
from partc.compiler.options import GraphOptions
from partc.runtime.errors import BadModel
from tests.builders.graphs.foreign_steps import ADAM, parse, with_zeros


def proposed(inputs: str, outputs: str) -> dict[str, str]:
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {{ y = Identity (x) }}'
    )
    return propose_state(model.graph)


def floats(*names: str) -> str:
    return ", ".join(f'float[4,3] "{name}"' for name in names)


@pytest.mark.parametrize(
    ("name", "following"),
    [
        *[("W", f"W_{end}") for end in ("next", "new", "updated", "out", "after")],
        *[("fc.W", following) for following in ("fc.W.next", "new_fc.W", "fc.W_new_1", "updated/fc.W")],
        *[("w1", following) for following in ("w1n", "W1_New", "w1Next", "w1_out0")],
        *[("m_in", "m_out"), ("old_v", "new_v"), ("W_prev", "W"), ("v_t", "v_t1")],
    ],
)
def test_a_name_with_its_next_makes_a_pair(name: str, following: str) -> None:
    assert proposed(floats("x", name), floats("y", following)) == {name: following}


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (floats("x", "W"), floats("W_next", "W_new")),
        (floats("x", "W"), "float[4] W_next"),
        (floats("x", "W"), "double[4,3] W_next"),
        (floats("x", "W"), floats("V_next")),
        (floats("x", "W"), floats("loss")),
    ],
    ids="two-outputs shape dtype name none".split(),
)
def test_what_names_do_not_tell_is_not_proposed(inputs: str, outputs: str) -> None:
    assert proposed(inputs, outputs) == {}


def test_the_closer_name_is_taken() -> None:
    found = proposed(floats("x", "W", "W_t"), floats("W_next", "W_t_next"))

    assert found == {"W": "W_next", "W_t": "W_t_next"}


def test_the_proposal_that_is_printed_imports_the_model() -> None:
    model = with_zeros(parse(ADAM), "W", "m", "v", "count")
    with pytest.raises(BadModel, match="by their names no next values: loss") as refusal:
        import_training_graph(model)

    option = re.search(r"--state '([^']*)'", str(refusal.value))
    assert option is not None
    training = import_training_graph(model, GraphOptions(state=parse_pairs(option[1], "--state")))
    assert set(training.variables) == {"W", "m", "v", "count"}
    assert set(training.gradients) == {"W"}
