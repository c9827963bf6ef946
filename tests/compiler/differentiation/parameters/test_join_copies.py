"""A parameter of which the exporter stored views trains as one; where they meet unseen, the user is asked."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.parameters.exporter_merges import undo_merges
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.runtime.errors import BadUsage
from tests.builders.graphs.exported_models import as_exported, stored_model
from tests.checks.training_steps import train

Arrays = Mapping[str, np.ndarray]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype(np.float32)
W = RNG.normal(size=(4, 4)).astype(np.float32)
ZEROS = np.zeros((4, 4), np.float32)

# What the exporter calls a view of w and stores; the nodes that make it; and a reader.
VIEWS = {
    "reshape": (
        ("view", W.reshape(8, 2)),
        "view = Reshape (w, size)",
        "xx = Concat <axis = 1> (x, x) b = MatMul (xx, view)",
    ),
    "unsqueeze": (
        ("unsqueeze", W[None]),
        "unsqueeze = Unsqueeze (w, zero)",
        "xs = Unsqueeze (x, one) d = Sub (xs, unsqueeze) b = ReduceMax (d, one)",
    ),
    "row": (
        ("select", W[1]),
        "at = Constant <value_int = 1> () select = Gather (w, at)",
        "b = Mul (x, select)",
    ),
    "rows": (
        ("slice_1", W[1:]),
        "slice_1 = Slice (w, one, four, zero)",
        "xs = Slice (x, zero, three, one) b = MatMul (xs, slice_1)",
    ),
    "every second column, transposed": (
        ("permute", W[:, ::2].T),
        "s = Slice (w, zero, four, one, two) permute = Transpose <perm = [1, 0]> (s)",
        "xs = Slice (x, zero, two, one) b = MatMul (xs, permute)",
    ),
}
NUMBERS = """
    zero = Constant <value_ints = [0]> () one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> () three = Constant <value_ints = [3]> ()
    four = Constant <value_ints = [4]> () size = Constant <value_ints = [8, 2]> ()
"""
LOSS = """
    f = Mul (a, a) fm = ReduceMean <keepdims = 0> (f)
    g = Tanh (b) gm = ReduceMean <keepdims = 0> (g) loss = Add (fm, gm)
"""
FOLDED = {  # a view by that name -> what it was folded from
    "view": ("w", "val_6"),
    "unsqueeze": ("w", "val_1"),
    "unsqueeze_1": ("w", "val_2"),
    "select": ("w", "val_2"),
    "slice_1": ("w", "val_3"),
    "slice_2": ("w", "val_4"),
    "permute": ("w", "slice_9", "val_5"),
    "t": ("w",),
    "val_10": ("w",),
    "_to_copy": ("w",),
}


def model_of(body: str, values: Arrays) -> onnx.ModelProto:
    """Return a graph that makes a and b of x and what is stored."""
    text = f"net (float[6,4] x) => (float loss) {{ {NUMBERS} {body} {LOSS} }}"
    return stored_model(text, {name: np.ascontiguousarray(value) for name, value in values.items()})


def exported(body: str, values: Arrays, operations: Mapping[str, str] | None = None) -> onnx.ModelProto:
    """Return the graph as PyTorch's exporter leaves it; without w among the values, w is gone."""
    return as_exported(
        model_of(body, values),
        parameters=("w",) if "w" in values else (),
        gone=() if "w" in values else ("w",),
        folded={name: FOLDED[name] for name in values if name in FOLDED},
        operations=operations,
    )


def step_of(model: onnx.ModelProto, folder: Path | None = None) -> onnx.ModelProto:
    return build_training_graph(model, loss="loss", optimizer=SGD(lr=0.5), folder=folder)


def after_two_steps(model: onnx.ModelProto) -> tuple[list[float], Arrays]:
    return train(step_of(model), [{"x": X}] * 2)


def assert_trains_as(model: onnx.ModelProto, plain: onnx.ModelProto, *, rearranged: bool = False) -> None:
    losses, after = after_two_steps(model)
    expected_losses, expected = after_two_steps(plain)

    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    (actual,) = after.values()
    if rearranged:
        actual, expected = np.sort(actual, axis=None), {"w": np.sort(expected["w"], axis=None)}
    np.testing.assert_allclose(actual, expected["w"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_that_is_stored_beside_its_parameter_is_computed_from_it(name: str) -> None:
    (copy, value), maker, reader = VIEWS[name]
    body = f"a = MatMul (x, w) {reader}"

    model = exported(body, {"w": W, copy: value})

    assert_trains_as(model, as_exported(model_of(f"{maker} {body}", {"w": W}), parameters=("w",)))


@pytest.mark.parametrize("name", ["reshape", "unsqueeze", "row", "rows"])
def test_a_view_of_another_view_is_computed_from_that_where_the_parameter_is_gone(name: str) -> None:
    (copy, value), maker, reader = VIEWS[name]
    body = f"a = MatMul (x, t) {reader}"
    whole = f"t = Transpose <perm = [1, 0]> (w) {maker} {body}"

    model = exported(body, {"t": W.T, copy: value})

    plain = as_exported(model_of(whole, {"w": W}), parameters=("w",))
    assert_trains_as(model, plain, rearranged=True)


def test_external_data_is_compared_too(tmp_path: Path) -> None:
    (copy, value), maker, reader = VIEWS["rows"]
    body = f"a = MatMul (x, w) {reader}"
    onnx.save(
        exported(body, {"w": W, copy: value}),
        tmp_path / "net.onnx",
        save_as_external_data=True,
        location="net.data",
        size_threshold=0,
    )

    model = onnx.load(tmp_path / "net.onnx", load_external_data=False)

    losses, after = train(step_of(model, tmp_path), [{"x": X}] * 2)
    plain = as_exported(model_of(f"{maker} {body}", {"w": W}), parameters=("w",))
    expected_losses, expected = after_two_steps(plain)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    np.testing.assert_allclose(after["w"], expected["w"], rtol=1e-5)


def test_the_transpose_of_zeros_is_told_by_its_name() -> None:
    _, copies = undo_merges(exported("a = MatMul (x, w) b = MatMul (x, t)", {"w": ZEROS, "t": ZEROS}))

    assert copies == {"t": "w"}


TWO_PARTS = "s = Slice (x, zero, three, one) a = MatMul (s, slice_1) b = MatMul (s, slice_2)"
BOTH = "a = MatMul (x, w) b = MatMul (x, val_10)"
ASKED = {
    "parts that overlap": (exported(TWO_PARTS, {"slice_1": W[:3], "slice_2": W[1:]}), "slice_1.*slice_2"),
    "zeros that are a parameter's or its transpose": (
        exported(BOTH, {"w": ZEROS, "val_10": ZEROS}, {"b": "%x, %p_w"}),
        "val_10",
    ),
    "a row of ones": (
        exported("a = MatMul (x, w) b = Mul (x, select)", {"w": ZEROS + 1, "select": ZEROS[0] + 1}),
        "select",
    ),
    "elements in an order that is no view": (
        exported("a = MatMul (x, w) b = MatMul (x, t)", {"w": W, "t": W[::-1]}),
        "t",
    ),
}


@pytest.mark.parametrize(("model", "names"), ASKED.values(), ids=ASKED)
def test_copies_that_may_share_elements_are_asked_for(model: onnx.ModelProto, names: str) -> None:
    with pytest.raises(BadUsage, match=rf"copies or parts of one parameter.*{names}"):
        step_of(model)


def test_what_is_asked_for_is_trained_or_frozen_as_the_user_says() -> None:
    model = exported(TWO_PARTS, {"slice_1": W[:3], "slice_2": W[1:]})

    apart = build_training_graph(
        model, loss="loss", optimizer=SGD(lr=0.5), parameters=ParameterChoice(train=("*",))
    )
    one = build_training_graph(
        model, loss="loss", optimizer=SGD(lr=0.5), parameters=ParameterChoice(("*",), ("slice_2",))
    )

    assert train(apart, [{"x": X}])[1].keys() == {"slice_1", "slice_2"}
    assert train(one, [{"x": X}])[1].keys() == {"slice_1"}


def test_parts_without_a_common_element_are_trained_as_they_are() -> None:
    body = "s = Slice (x, zero, two, one) a = MatMul (s, slice_1) b = MatMul (s, slice_2)"

    _, after = after_two_steps(exported(body, {"slice_1": W[:2], "slice_2": W[2:]}))

    assert after.keys() == {"slice_1", "slice_2"}


@pytest.mark.parametrize(("rows", "are_untied"), [(400, False), (399, True)])
def test_large_parts_have_values_in_common_by_chance(rows: int, are_untied: bool) -> None:
    table = RNG.integers(0, 1 << 14, (800, 64)).astype(np.float32)
    text = """net (float[1,800] x) => (float loss) {
        k = Constant <value_ints = [400, 400]> () p, q = Split <axis = 1> (x, k)
        a = MatMul (p, slice_1) b = MatMul (p, slice_2) c = Add (a, b)
        loss = ReduceMean <keepdims = 0> (c) }"""
    values = {"slice_1": table[:400], "slice_2": table[rows : rows + 400]}
    model = as_exported(stored_model(text, values), gone=("w",), folded={n: FOLDED[n] for n in values})

    marked, _ = undo_merges(model)

    entries = [entry for value in marked.graph.value_info for entry in value.metadata_props]
    assert any(entry.key == "partc.undecided" for entry in entries) == are_untied


def as_torchscript(model: onnx.ModelProto, *folded: str) -> onnx.ModelProto:
    """Return the model by the names that TorchScript's exporter gives to what it folds."""
    model.producer_name = "pytorch"
    names = {name: f"onnx::Folded_{index}" for index, name in enumerate(folded)}
    for tensor in model.graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for node in model.graph.node:
        node.input[:] = [names.get(read, read) for read in node.input]
    return model


@pytest.mark.parametrize("name", VIEWS)
def test_torchscripts_folded_views_of_a_named_parameter_are_computed_from_it(name: str) -> None:
    (copy, value), maker, reader = VIEWS[name]
    body = f"a = MatMul (x, w) {reader}"
    model = as_torchscript(model_of(body, {"w": W, copy: value}), copy)

    assert_trains_as(model, as_exported(model_of(f"{maker} {body}", {"w": W}), parameters=("w",)))


def test_torchscripts_folded_views_of_each_other_are_asked_for() -> None:
    body = "a = MatMul (x, t) b = Mul (x, select)"
    model = as_torchscript(model_of(body, {"t": W.T, "select": W[1]}), "t", "select")

    with pytest.raises(BadUsage, match=r"copies or parts of one parameter.*onnx::Folded_0, onnx::Folded_1"):
        step_of(model)


def test_torchscripts_equal_weights_of_copied_layers_train_apart() -> None:
    body = "a = MatMul (x, t) c = MatMul (x, u) b = Tanh (c)"

    _, after = after_two_steps(as_torchscript(model_of(body, {"t": W, "u": W}), "t", "u"))

    assert after.keys() == {"onnx::Folded_0", "onnx::Folded_1"}


def test_torchscripts_view_of_parameters_that_are_equal_is_asked_for() -> None:
    """Layers that were copied have equal parameters: whose row it is nothing tells."""
    body = "a = MatMul (x, w) c = MatMul (a, v) b = Mul (c, select)"
    model = as_torchscript(model_of(body, {"w": W, "v": W, "select": W[1]}), "select")

    with pytest.raises(BadUsage, match=r"copies or parts of one parameter.*onnx::Folded_0"):
        step_of(model)


def test_torchscripts_progressions_tell_no_view() -> None:
    table = np.arange(16, dtype=np.float32).reshape(4, 4)
    body = "a = MatMul (x, w) b = Mul (x, select)"

    _, joined = undo_merges(as_torchscript(model_of(body, {"w": table, "select": table[0]}), "select"))

    assert joined == {}


def test_a_view_that_no_gradient_passes_is_asked_for() -> None:
    """Computed from the parameter it would be trained through `detach`."""
    model = as_exported(
        model_of("a = MatMul (x, w) b = Mul (x, select)", {"w": W, "select": W[1]}),
        parameters=("w",),
        folded={"select": ("w", "detach", "val_6")},
    )

    with pytest.raises(BadUsage, match="select"):
        step_of(model)
