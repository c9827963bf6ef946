"""What is a parameter and what a constant: by the exporter's metadata, by values, by structure."""

import shlex
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.objective import weigh_parameters
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.parameters.decision import Verdict
from partc.compiler.differentiation.updates.adam import LAMB
from partc.compiler.differentiation.updates.optimizers import SGD, Momentum, Optimizer
from partc.compiler.importing.import_training import import_training_graph
from partc.runtime.errors import BadUsage, UnsupportedModel
from partc.runtime.execution.in_process import train_in_process
from tests.builders.graphs.exported_models import as_exported, stored_model
from tests.builders.plans.compiled_steps import compile_step, random_batches
from tests.checks.command_line import done, partc
from tests.checks.training_steps import initial_variables, train

LARGEST = np.finfo(np.float32).max
RNG = np.random.default_rng(0)
ATTENTION = """
attend (float[2,6,4] x) => (float[2,6,4] y) {
    h = MatMul (x, W)
    t = Transpose <perm = [0, 2, 1]> (h)
    scores = MatMul (h, t)
    masked = Add (scores, added)
    p = Softmax (masked)
    y = MatMul (p, h)
}
"""
W = RNG.normal(size=(4, 4)).astype(np.float32)
CAUSAL = np.triu(np.full((1, 6, 6), -LARGEST, np.float32), 1)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def sinusoids(rows: int, columns: int) -> np.ndarray:
    angles = np.arange(rows)[:, None] / 10000 ** (np.arange(columns) / columns)
    return np.where(np.arange(columns) % 2, np.cos(angles), np.sin(angles)).astype(np.float32)


def verdict(model: onnx.ModelProto, name: str, loss: str = "mse") -> str:
    return weigh_parameters(model, loss)[name].verdict.value


# ---------------------------------------------------------------- structure and values, no metadata


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (CAUSAL, "constant"),
        (np.where(CAUSAL < 0, -np.inf, 0).astype(np.float32), "constant"),
        (np.where(CAUSAL < 0, -10000, 0).astype(np.float32), "constant"),
        (normal(1, 6, 6), "trained"),  # a learned bias of positions, as in Swin
        (np.zeros((1, 6, 6), np.float32), "undecided"),  # one at its start, or a mask of nothing
        (np.tril(np.ones((1, 6, 6), np.float32)), "undecided"),
        (-np.abs(np.subtract.outer(np.arange(6), np.arange(6)))[None].astype(np.float32), "undecided"),
        (normal(2, 6, 6), "undecided"),  # an entry per sample
        (normal(6), "trained"),
    ],
)
def test_what_is_added_to_scores_is_told_by_its_values(added: np.ndarray, expected: str) -> None:
    model = stored_model(ATTENTION, {"W": W, "added": added})

    assert verdict(model, "added") == expected
    assert verdict(model, "W") == "trained"


DENSE = "net (float[N,4] x) => (float[N,4] y) {{ {} }}"


@pytest.mark.parametrize(
    ("nodes", "values", "expected"),
    [
        ("h = MatMul (x, W) y = Add (h, c)", np.zeros(4), "trained"),
        ("h = MatMul (x, W) y = Mul (h, c)", np.ones(4), "trained"),
        ("h = MatMul (x, W) y = Add (h, c)", np.array([0.0, 1, 1, 0]), "trained"),  # a bias of forget gates
        ("h = MatMul (x, W) r = Relu (h) y = Mul (r, c)", np.full(4, 1e-6), "trained"),  # scale of a layer
        ("h = MatMul (x, W) r = Relu (h) y = Mul (r, c)", np.array([1, 0.1, 0.01, 0.001]), "undecided"),
        ("h = MatMul (x, W) r = Relu (h) y = Add (r, c)", np.arange(4.0), "undecided"),
        ("h = MatMul (x, W) r = Relu (h) y = Mul (r, c)", np.full(1, 0.5), "undecided"),
        ("n = Sub (x, c) y = MatMul (n, W)", np.array([0.485, 0.456, 0.406, 0.5]), "undecided"),  # of images
        ("y = MatMul (x, c)", np.eye(4), "undecided"),
        ("y = MatMul (x, c)", normal(4, 4), "trained"),
        ("y = MatMul (x, c)", np.arange(16.0).reshape(4, 4), "trained"),  # somebody's toy
        ("t = Transpose (c) y = MatMul (x, t)", normal(4, 4), "trained"),
        ("e = Exp (c) y = MatMul (x, e)", normal(4, 4), "trained"),  # the graph itself computes it
        ("one = Constant <value = float {1.0}> () h = MatMul (x, W) s = Add (c, one) y = Mul (h, s)",
         np.zeros(4), "trained"),
        ("h = MatMul (x, W) y = Mul (h, c)", np.array(0.5), "constant"),
    ],
)  # fmt: skip
def test_structure_tells_weights_biases_and_scales(nodes: str, values: np.ndarray, expected: str) -> None:
    model = stored_model(DENSE.format(nodes), {"W": W, "c": values.astype(np.float32)})

    assert verdict(model, "c") == expected


def test_tables_that_rows_are_gathered_from_are_trained_but_for_sinusoids() -> None:
    text = """words (int64[N,6] ids) => (float[N,6,8] y) { a = Gather (E, ids) y = Add (a, P) }"""
    learned = stored_model(text, {"E": normal(10, 8), "P": normal(6, 8)})
    fixed = stored_model(text, {"E": sinusoids(10, 8), "P": sinusoids(6, 8)})

    assert {d.verdict for d in weigh_parameters(learned, "mse").values()} == {Verdict.TRAINED}
    assert {d.verdict for d in weigh_parameters(fixed, "mse").values()} == {Verdict.UNDECIDED}


def test_rotary_tables_are_not_trained_by_themselves() -> None:
    text = "rotary (float[2,16,8] x) => (float[2,16,8] y) { h = MatMul (x, W) y = Mul (h, cos) }"
    angles = np.arange(16)[:, None] / 10000 ** (np.arange(4) / 4)
    cos = np.cos(np.concatenate([angles, angles], axis=1)).astype(np.float32)

    assert verdict(stored_model(text, {"W": normal(8, 8), "cos": cos}), "cos") == "undecided"


def test_external_values_are_read_and_stay_inside_the_folder(tmp_path: Path) -> None:
    model = stored_model(ATTENTION, {"W": W, "added": CAUSAL})
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    light = onnx.load(tmp_path / "m.onnx", load_external_data=False)

    assert weigh_parameters(light, "mse", tmp_path)["added"].verdict is Verdict.CONSTANT
    (tmp_path / "inner").mkdir()
    for tensor in light.graph.initializer:
        next(entry for entry in tensor.external_data if entry.key == "location").value = "../m.bin"
    assert weigh_parameters(light, "mse", tmp_path / "inner")["added"].verdict is not Verdict.CONSTANT


# ---------------------------------------------------------------- metadata of the exporter


@pytest.mark.parametrize("shape", [(1, 6, 6), (6,), ()])
def test_the_exporters_kinds_decide_whatever_values_look_like(shape: tuple[int, ...]) -> None:
    for values in (np.zeros(shape), np.ones(shape), RNG.normal(size=shape)):
        model = stored_model(ATTENTION, {"W": W, "added": values.astype(np.float32)})
        learned = as_exported(model, parameters=("W", "added"))
        assert verdict(learned, "added") == "trained"
        del model.graph.value_info[:], model.graph.metadata_props[:]
        assert verdict(as_exported(model, parameters=("W",), buffers=("added",)), "added") == "constant"


def test_a_parameter_with_a_sinusoids_values_is_asked_for() -> None:
    text = "words (int64[N,6] ids) => (float[N,6,8] y) { y = Gather (E, ids) }"
    model = as_exported(stored_model(text, {"E": sinusoids(12, 8)}), parameters=("E",))

    assert verdict(model, "E") == "undecided"


@pytest.mark.parametrize(
    ("name", "sources", "reads", "expected"),
    [
        ("val_9", ("arange", "eye", "val_3"), "%x, %val_9", "constant"),
        ("val_9", ("w",), "%x, %p_w", "trained"),  # transposed for MatMul
        ("val_9", ("w",), "%x, %exp", "undecided"),  # a step of some other operation
        ("permute_2", ("w", "val_1"), "%x, %permute_2", "trained"),
        ("view", ("w", "permute", "slice_4"), "%x, %view", "trained"),
        ("add_6", ("w", "val_3"), "%x, %add_6", "undecided"),  # 1 + w
        ("exp", ("w",), "%x, %exp", "undecided"),
        ("expand", ("w", "val_3"), "%x, %expand", "undecided"),  # a row for every sample
        ("getitem", ("w", "view"), "%x, %getitem", "undecided"),  # normalised, perhaps
        ("embedding", ("w", "arange", "add"), "%x, %embedding", "trained"),  # rows 0 .. n - 1
        ("val_9", ("w", "buffer"), "%x, %p_w", "undecided"),  # multiplied with a table of coordinates
        ("val_9", ("w", "v"), "%x, %p_w, %p_v", "undecided"),
    ],
)
def test_what_was_folded_from_a_parameter(
    name: str, sources: tuple[str, ...], reads: str, expected: str
) -> None:
    text = DENSE.format(f"h = MatMul (x, {name}) y = Relu (h)")
    model = as_exported(
        stored_model(text, {name: normal(4, 4)}),
        gone=("w", "v"),
        folded={name: sources},
        operations={"h": reads},
    )

    assert verdict(model, name) == expected


def test_gathered_rows_that_repeat_are_asked_for() -> None:
    values = np.repeat(normal(1, 4), 4, axis=0)
    model = stored_model(
        DENSE.format("h = MatMul (x, W) y = MatMul (h, embedding)"), {"W": W, "embedding": values}
    )
    folded = as_exported(model, parameters=("W",), gone=("w",), folded={"embedding": ("w", "expand")})

    assert verdict(folded, "embedding") == "undecided"


def test_scalar_parameters_train() -> None:
    text = DENSE.format("h = MatMul (x, W) y = Mul (h, temperature)")
    model = stored_model(text, {"W": W, "temperature": np.array(0.5, np.float32)})
    step = build_training_graph(
        as_exported(model, parameters=("W", "temperature")), loss="mse", optimizer=SGD(1.0)
    )
    x, targets = normal(3, 4), normal(3, 4)

    _, after = train(step, [{"x": x, "targets": targets}])

    h = x @ W
    expected = 0.5 - (2 * (0.5 * h - targets) * h).mean()
    np.testing.assert_allclose(after["temperature"], expected, rtol=1e-5)
    assert after["temperature"].shape == ()


@pytest.mark.parametrize("optimizer", [Momentum(0.1), LAMB(0.1)])
@pytest.mark.parametrize("reinit", [None, 3])
def test_scalar_parameters_train_on_ranks_as_on_one_device(
    tmp_path: Path, optimizer: Optimizer, reinit: int | None
) -> None:
    text = DENSE.replace("N", "8").format("h = MatMul (x, W) y = Mul (h, temperature)")
    model = stored_model(text, {"W": W, "temperature": np.array(0.5, np.float32)})
    exported = as_exported(model, parameters=("W", "temperature"))
    step = build_training_graph(exported, loss="mse", optimizer=optimizer, reinit=reinit)
    compiled = compile_step(import_training_graph(step), tmp_path / "out", "1x2", batch="global")
    batches = random_batches(compiled.plan, 3)

    start = initial_variables(step)
    trained = train_in_process(compiled.folder, batches, start).variables

    _, after = train(step, batches)
    assert start["temperature"] == 0.5  # nothing to draw it from
    for name, value in after.items():
        np.testing.assert_allclose(trained[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_numbers_that_a_torchscript_module_holds_are_asked_for() -> None:
    text = DENSE.format("h = MatMul (x, W) y = Mul (h, logit_scale)")
    model = stored_model(text, {"W": W, "logit_scale": np.array(2.0, np.float32)})
    model.producer_name = "pytorch"

    assert verdict(model, "logit_scale") == "undecided"
    assert verdict(model, "W") == "trained"


def test_a_bias_of_one_entry_is_trained_wherever_it_comes_from() -> None:
    model = stored_model(
        "net (float[3,4] x) => (float[3,1] y) { y = Gemm (x, V, b) }", {"V": normal(4, 1), "b": normal(1)}
    )
    model.producer_name = "pytorch"

    assert verdict(model, "b") == "trained"


@pytest.mark.parametrize("added", ["e = Gather (E, same)", "f = Unsqueeze (E, first) e = Expand (f, batch)"])
def test_what_an_unoptimised_export_repeats_for_every_sample_is_trained(added: str) -> None:
    """A table of token types read by zeros, a class token."""
    text = f"net (float[3,4] x) => (float[3,4] y) {{ h = MatMul (x, W) {added} y = Add (h, e) }}"
    rows = normal(2, 4) if "Gather" in added else normal(4)
    constants = {"same": [0, 0, 0], "first": [0], "batch": [3, 4]}
    values = {"W": W, "E": rows, **{name: np.array(value) for name, value in constants.items()}}

    assert verdict(stored_model(text, values), "E") == "trained"


# ---------------------------------------------------------------- refusals, options, what is told


def unclear() -> onnx.ModelProto:
    text = DENSE.format(
        "n = Sub (x, mean) h = MatMul (n, W) r = Relu (h) a = Mul (r, gate_1) y = Mul (a, gate_2)"
    )
    gate = np.full(1, 0.5, np.float32)
    return stored_model(text, {"mean": normal(4), "W": W, "gate_1": gate, "gate_2": gate})


def test_what_nothing_tells_is_refused_with_options_that_work(tmp_path: Path) -> None:
    forward, out = tmp_path / "forward.onnx", tmp_path / "train.onnx"
    onnx.save(unclear(), forward)
    arguments = ("grad", forward, "--loss", "mse", "-o", out)

    told = partc(*arguments)

    assert told.code == 2
    assert not out.exists()
    assert "whether 3 tensors are trained" in told.error
    assert "no layer has touched" in told.error
    frozen = shlex.split(told.error.split("--freeze ")[1])[0]
    assert frozen == "mean,gate_*"
    done(*arguments, "--freeze", frozen)
    assert {value.name for value in onnx.load(out).graph.input} == {"x", "targets", "W"}
    done(*arguments, "--train", "*", "--freeze", "mean")
    names = {value.name for value in onnx.load(out).graph.input}
    assert names == {"x", "targets", "W", "gate_1", "gate_2"}


def test_the_python_interface_refuses_alike() -> None:
    with pytest.raises(BadUsage, match="whether 3 tensors are trained"):
        build_training_graph(unclear(), loss="mse", optimizer=SGD())
    build_training_graph(unclear(), loss="mse", optimizer=SGD(), parameters=ParameterChoice(train=("W",)))


def test_it_is_told_what_is_trained_and_why() -> None:
    text = DENSE.format(
        "h = MatMul (x, W) a = Add (h, first_bias) s = Mul (a, temperature) y = Add (s, first_bias)"
    )
    values = {"W": W, "first_bias": np.zeros(4, np.float32), "temperature": np.array(2, np.float32)}
    model = as_exported(
        stored_model(text, values),
        parameters=("W", "first_bias"),
        buffers=("temperature",),
        gone=("second_bias",),
        operations={"a": "%h, %p_first_bias", "y": "%s, %p_second_bias"},
    )
    lines: list[str] = []

    build_training_graph(model, loss="mse", optimizer=SGD(), tell=lines.append)

    assert lines == [
        "trained: 3 parameters, 24 elements, 96 B",
        "  3 parameters, as the exporter says: W, first_bias, second_bias",
        "constant: 1 tensor, 1 element, 4 B",
        "  1 buffers and constants, as the exporter says: temperature",
    ]


def test_lamb_trains_beside_a_mask_of_the_least_numbers() -> None:
    """LAMB takes the norm of what it trains: a mask's overflows."""
    model = stored_model(ATTENTION, {"W": W, "added": CAUSAL})
    step = build_training_graph(model, loss="mse", optimizer=LAMB(0.01))
    x, targets = normal(2, 6, 4), normal(2, 6, 4)

    _, after = train(step, [{"x": x, "targets": targets}] * 3)

    assert all(np.isfinite(value).all() for value in after.values())
    (kept,) = (tensor for tensor in step.graph.initializer if tensor.name == "added")
    np.testing.assert_array_equal(numpy_helper.to_array(kept), CAUSAL)


# ---------------------------------------------------------------- gradients that the module stops


def test_no_gradient_passes_what_is_detached() -> None:
    """y = a * detach(a): the gradient is half of that of a * a."""
    text = DENSE.format("a = MatMul (x, W) detach = Identity (a) y = Mul (a, detach)")
    model = as_exported(stored_model(text, {"W": W}), parameters=("W",), operations={"detach": "%a"})
    x, targets = normal(3, 4), normal(3, 4)

    _, after = train(
        build_training_graph(model, loss="mse", optimizer=SGD(1.0)), [{"x": x, "targets": targets}]
    )

    a = x @ W
    np.testing.assert_allclose(
        W - after["W"], x.T @ (2 * (a * a - targets) / a.size * a), rtol=1e-4, atol=1e-5
    )


def test_a_parameter_behind_what_is_detached_is_told() -> None:
    text = DENSE.format("a = MatMul (x, W) detach = Identity (a) b = MatMul (x, V) y = Add (b, detach)")
    operations = {"detach": "%a"}
    model = as_exported(
        stored_model(text, {"W": W, "V": 2 * W}), parameters=("W", "V"), operations=operations
    )
    lines: list[str] = []

    build_training_graph(model, loss="mse", optimizer=SGD(), tell=lines.append)

    assert lines[1].endswith("as the exporter says: V")
    assert lines[2].startswith("constant: 1 tensor")
    assert lines[3].endswith("1 whose gradient the module stops: W")


def test_a_detached_tensor_that_the_optimiser_removed_is_refused() -> None:
    text = DENSE.format("a = MatMul (x, W) y = Mul (a, a)")
    model = as_exported(
        stored_model(text, {"W": W}), parameters=("W",), operations={"a": "%x, %p_W", "y": "%a, %detach"}
    )

    with pytest.raises(
        UnsupportedModel, match=r"stops the gradient at 'detach'[^$]*fix: export with optimize=False"
    ):
        build_training_graph(model, loss="mse", optimizer=SGD())
