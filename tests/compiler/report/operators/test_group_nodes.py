"""Groups and layers: every node is in one, layers have the names of parameters, gradients know their node."""

from pathlib import Path

import pytest

from partc.compiler.report.operators.group_nodes import Way, group_nodes, name_layers
from partc.passes.search.operators.find_groups import OperatorGroup
from tests.builders.plans.compiled_steps import compile_step, import_text
from tests.compiler.report.operators.conftest import Page

FOREIGN = """
step (float[8,4] x, float[8,2] wanted, float[4,6] "block.0.first.w", float[6,2] "block.1.second.w")
    => (float loss, float[4,6] "block.0.first.w_next", float[6,2] "block.1.second.w_next") {
    hidden = MatMul (x, "block.0.first.w")
    kept = Tanh (hidden)
    made = MatMul (kept, "block.1.second.w")
    error = Sub (made, wanted)
    squared = Mul (error, error)
    loss = ReduceMean <keepdims = 0> (squared)
    across = Transpose <perm = [1, 0]> (kept)
    second_gradient = MatMul (across, error)
    back = Transpose <perm = [1, 0]> ("block.1.second.w")
    into = MatMul (error, back)
    ones = Mul (kept, kept)
    one = Constant <value = float {1.0}> ()
    slope = Sub (one, ones)
    before = Mul (into, slope)
    turned = Transpose <perm = [1, 0]> (x)
    first_gradient = MatMul (turned, before)
    "block.0.first.w_next" = Sub ("block.0.first.w", first_gradient)
    "block.1.second.w_next" = Sub ("block.1.second.w", second_gradient)
}
"""


@pytest.mark.parametrize("name", ["mesh_page", "server_page"])
def test_every_node_of_the_plan_is_in_one_group(name: str, request: pytest.FixtureRequest) -> None:
    page: Page = request.getfixturevalue(name)
    groups = group_nodes(page.compilation)

    members = [node for group in groups.groups for node in group.nodes]
    assert sorted(members) == sorted(node.name for node in page.compilation.training.graph.nodes)


def test_layers_are_the_beginnings_of_parameters_names(mesh_page: Page) -> None:
    groups = group_nodes(mesh_page.compilation)

    assert groups.layers == ("layer0", "layer1", "layer2")
    for group in groups.groups:
        assert group.operator is not None
        assert group.operator.reads == (f"{groups.layers[group.layer]}.weight",)
        applied = f"Sub:{group.operator.reads[0]}_next"
        assert applied in group.nodes
        assert groups.ways[applied] is Way.UPDATE


def test_gradients_that_partc_wrote_know_their_node_by_name(mesh_page: Page) -> None:
    of = group_nodes(mesh_page.compilation).gradient_of

    assert of["MatMul:MatMul_8/gradient/MatMul_1"] == "MatMul:MatMul_8"
    assert of["Relu:Relu_5/gradient/Where"] == "Relu:Relu_5"


def test_gradients_of_other_origin_are_found_by_what_they_read(tmp_path: Path) -> None:
    compilation = compile_step(
        import_text(FOREIGN), tmp_path / "out", "1x2", "tensor=2", "global"
    ).compilation
    groups = group_nodes(compilation)
    node_of = {t.name: n.name for n in compilation.training.graph.nodes for t in n.outputs}

    def gradient_of(tensor: str) -> str:
        return groups.gradient_of[node_of[tensor]]

    assert groups.layers == ("block.0.first", "block.1.second")
    assert gradient_of("second_gradient") == gradient_of("across") == node_of["made"]
    assert gradient_of("first_gradient") == node_of["hidden"]
    assert gradient_of("slope") == node_of["kept"]


def test_without_telling_names_layers_are_the_blocks_that_repeat() -> None:
    # An embedding, fifty blocks of three operators, and a last one; no name says so.
    shapes = [(100, 4), *[(8, 16), (8, 16), (8, 4)] * 50, (8, 2)]
    operators = [OperatorGroup(f"n{n}", "MatMul", shape, (f"w{n}",), 0, {}) for n, shape in enumerate(shapes)]

    layers, numbers = name_layers([operator.reads for operator in operators], operators)

    assert layers[:3] == ["w0", "w1 – w3", "w4 – w6"]
    assert len(layers) == 52
    assert numbers == sorted(numbers)
