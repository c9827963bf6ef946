import json
from contextlib import suppress
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from safetensors.numpy import save_file

from partc.compiler.importing import constant_tensors
from partc.compiler.importing.bindings import (
    METADATA_KEY,
    Bindings,
    annotated_source,
    read_bindings,
    write_bindings,
)
from partc.compiler.importing.import_training import import_training_graph, read_training_graph
from partc.compiler.model_files.model_file import check_model
from partc.compiler.options import GraphOptions
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.training_graph import Gradient, MadeTensor, StoredTensor
from partc.runtime.errors import BadModel, PartcError, UnsupportedModel
from partc.runtime.plan.variables import Constant, DataInput, Normal, TakenValues, Uniform
from tests.builders.graphs.foreign_steps import CLIPPED, SGD, TABLE, import_step, parse, with_zeros

STATE = {"W": "W_next"}


def saved(model: onnx.ModelProto, folder: Path, sidecar: object = None) -> Path:
    path = folder / "train.onnx"
    path.write_bytes(model.SerializeToString())
    if sidecar is not None:
        path.with_name("train.onnx.json").write_text(json.dumps(sidecar))
    return path


def test_bindings_come_from_the_option_the_sidecar_or_the_metadata(tmp_path: Path) -> None:
    model = with_zeros(parse(SGD), "W")
    described = onnx.ModelProto.FromString(model.SerializeToString())
    write_bindings(described, Bindings(state=STATE))

    for source, state in (
        (model, STATE),
        (saved(model, tmp_path, {"state": STATE}), None),
        (described, None),
    ):
        training = import_training_graph(source, GraphOptions(state=state))
        assert training.variables["W"].next == "W_next"
        assert (training.outputs, training.loss) == (("loss",), "loss")


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({}, "if the names mean it, add --state 'W=W_next'; by their names no next values: loss"),
        ({"state": {"W": "gone"}}, "make 'gone' an output, or bind 'W' to one of W_next, loss"),
        ({"state": {"gone": "W_next"}}, "bind 'W_next' to one of the inputs W, t, x"),
        ({"state": {"W": "loss"}}, r"reshape it to \(4, 3\)"),
        ({"state": {"x": "W_next"}}, "add an initializer 'x', or give --initial"),
        ({"state": {"W": "W_next", "x": "W_next"}}, "give 'x' an output of its own"),
        ({"state": STATE, "sample_axes": {"x": 2}}, "use an axis from 0 to 1, or none"),
        ({"state": STATE, "sample_axes": {"W": 0}}, "use one of the data inputs t, x"),
        ({"state": STATE, "sample_axes": {"lr": 0}}, "use one of the data inputs t, x"),
        ({"state": STATE, "sample_axes": {"z": 0}}, "use one of the data inputs t, x"),
        ({"state": STATE, "loss": "z"}, "use one of W_next, loss"),
        ({"state": STATE, "initial": "nowhere.npz"}, "give a .npz or .safetensors file"),
    ],
)
def test_a_wrong_binding_is_refused_with_its_repair(options: dict[str, object], fix: str) -> None:
    with pytest.raises(PartcError, match=f"fix: {fix}"):
        import_training_graph(with_zeros(parse(SGD), "W"), GraphOptions(**options))  # type: ignore[arg-type]


def test_a_next_value_of_another_type_is_refused() -> None:
    text = SGD.replace("W_next = Sub (W, part)", "n = Sub (W, part)\n W_next = Cast <to = 11> (n)")
    text = text.replace("float[4,3] W_next)", "double[4,3] W_next)")

    with pytest.raises(BadModel, match="fix: cast it to float32"):
        import_step(text)


def test_a_sidecar_that_says_two_things_of_a_variable_is_refused(tmp_path: Path) -> None:
    path = saved(with_zeros(parse(SGD), "W"), tmp_path, {})
    path.with_name("train.onnx.json").write_text('{"state": {"W": "loss", "W": "W_next"}}')

    with pytest.raises(BadModel, match=r"the name 'W' is there twice"):
        import_training_graph(path, GraphOptions())


def test_a_sidecar_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    path = saved(with_zeros(parse(SGD), "W"), tmp_path, {"state": STATE, "losss": "loss"})

    with pytest.raises(BadModel, match=r"train.onnx.json\n  fix: write {\"state\""):
        import_training_graph(path)


def test_data_inputs_tell_their_sample_axis_and_their_range() -> None:
    training = import_step(TABLE)

    assert training.data_inputs["ids"] == DataInput("ids", "int64", (6,), 0, 10, TakenValues(10))
    assert training.data_inputs["more"].high == 10
    assert import_step(CLIPPED, sample_axes={"t": None}).data_inputs["t"].sample_axis is None


def test_symbolic_sizes_are_kept_and_older_opsets_are_converted() -> None:
    text = SGD.replace("float[8,4] x, float[8,3] t", "float[N,4] x, float[N,3] t")
    training = import_training_graph(with_zeros(parse(text, opset=18), "W"), GraphOptions(state=STATE))

    assert training.data_inputs["x"].shape == ("N", 4)
    assert training.opset == 21
    assert len({node.name for node in training.graph.nodes}) == len(training.graph.nodes)


def test_initial_values_are_references() -> None:
    model = parse(SGD)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 3), np.float32), "W"))
    initial = import_training_graph(model, GraphOptions(state=STATE)).variables["W"].initial

    assert isinstance(initial, StoredTensor)
    np.testing.assert_array_equal(initial.load(), np.ones((4, 3)))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_initial_values_come_from_a_file(tmp_path: Path, suffix: str) -> None:
    values = {"W": np.arange(12, dtype=np.float32).reshape(4, 3)}
    file = tmp_path / f"start{suffix}"
    if suffix == ".npz":
        np.savez(file, **values)
    else:
        save_file(values, file)
    path = saved(parse(SGD), tmp_path, {"state": STATE, "initial": file.name})

    initial = import_training_graph(path).variables["W"].initial

    assert isinstance(initial, StoredTensor)
    np.testing.assert_array_equal(initial.load(), values["W"])


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("lost", [np.nan, -np.inf])
def test_initial_values_that_are_not_finite_are_refused_and_counted(
    tmp_path: Path, suffix: str, lost: float
) -> None:
    values = {"W": np.arange(12, dtype=np.float32).reshape(4, 3)}
    values["W"][1, 1:] = lost
    file = tmp_path / f"start{suffix}"
    np.savez(file, **values) if suffix == ".npz" else save_file(values, file)

    with pytest.raises(BadModel, match="initial value of 'W' is not finite: 2 of 12 elements") as error:
        import_training_graph(parse(SGD), GraphOptions(state=STATE, initial=file))

    assert str(file) in error.value.at


def test_a_batch_without_samples_is_refused_as_such() -> None:
    model = with_zeros(parse(SGD.replace("[8,", "[0,")), "W")

    with pytest.raises(BadModel, match="the batch is empty: data input 'x'"):
        import_training_graph(model, GraphOptions(state=STATE))


def test_initial_values_of_another_shape_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "start.npz", W=np.zeros((3, 4), np.float32))

    with pytest.raises(BadModel, match=r"its initial value has shape \(3, 4\)"):
        import_training_graph(parse(SGD), GraphOptions(state=STATE, initial=tmp_path / "start.npz"))


@pytest.mark.parametrize(
    ("maker", "expected"),
    [
        ("W0 = RandomNormal <shape = [4, 3], scale = 0.5, seed = 7.0> ()", Normal(0.0, 0.5, 7)),
        ("W0 = RandomUniform <shape = [4, 3], low = -1.0, seed = 3.0> ()", Uniform(-1.0, 1.0, 3)),
        (
            "s = Constant <value = int64[2] {4, 3}> ()\n W0 = ConstantOfShape <value = float[1] {0.5}> (s)",
            Constant(0.5),
        ),
    ],
)
def test_initial_values_that_are_made_stay_formulas(maker: str, expected: object) -> None:
    model = parse(SGD)
    initialize(model, maker)

    assert import_training_graph(model, GraphOptions(state=STATE)).variables["W"].initial == expected


def test_initial_values_may_be_any_graph() -> None:
    model = parse(SGD)
    initialize(model, "u = RandomUniform <shape = [4, 3], seed = 1.0> ()\n W0 = Sqrt (u)\n other = Neg (u)")

    initial = import_training_graph(model, GraphOptions(state=STATE)).variables["W"].initial

    assert isinstance(initial, MadeTensor)
    assert [node.op_type for node in initial.model.graph.node] == ["RandomUniform", "Sqrt"]


@pytest.mark.parametrize(
    "maker", ["W0 = RandomNormal <shape = [4, 3]> ()", "u = RandomNormal <shape = [4, 3]> ()\n W0 = Abs (u)"]
)
def test_random_initial_values_need_a_seed(maker: str) -> None:
    model = parse(SGD)
    initialize(model, maker)

    with pytest.raises(BadModel, match="fix: give it a whole number as seed"):
        import_training_graph(model, GraphOptions(state=STATE))


def test_constants_of_one_value_are_made_and_never_stored() -> None:
    text = TABLE.replace("10, 4", "20000, 4").replace("10,4", "20000,4")
    text = text.replace("zeros = ConstantOfShape (size)", "")
    model = with_zeros(parse(text), "E")
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((20000, 4), np.float32), "zeros"))

    training = read_training_graph(model, GraphOptions(state={"E": "E_next"}))

    assert training.variables["E"].initial == Constant(0.0)
    assert training.graph.tensors()["zeros"].inputs[0].op == "ConstantOfShape"
    assert max(t.values.size for t in training.graph.tensors().values() if hasattr(t, "values")) < 10


def test_constants_in_external_data_are_brought_in_and_variables_are_not(tmp_path: Path) -> None:
    model = parse(SGD.replace("float lr = {0.1}", "float[4,3] lr"))
    for name, value in (("lr", 0.1), ("W", 2.0)):
        array = np.full((4, 3), value, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(
        model, tmp_path / "train.onnx", save_as_external_data=True, location="big.bin", size_threshold=0
    )

    training = import_training_graph(tmp_path / "train.onnx", GraphOptions(state=STATE))

    assert np.allclose(training.graph.tensors()["lr"].values, 0.1)
    initial = training.variables["W"].initial
    assert isinstance(initial, StoredTensor)
    assert not initial.proto.raw_data
    assert np.allclose(initial.load(), 2.0)
    source = onnx.ModelProto.FromString(training.source)  # lies in a plan, with no data beside it
    assert not any(tensor.external_data for tensor in source.graph.initializer)


def test_constants_that_no_model_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parse(SGD.replace("float lr = {0.1}", "float[4,3] lr"))
    model.graph.initializer.append(numpy_helper.from_array(np.full((4, 3), 0.1, np.float32), "lr"))
    model = with_zeros(model, "W")
    monkeypatch.setattr(constant_tensors, "PROTOBUF_LIMIT_BYTES", 50)

    with pytest.raises(UnsupportedModel, match=r"'lr' \(48 bytes\)\n  fix: .*--state lr=lr"):
        import_training_graph(model, GraphOptions(state=STATE))

    model.graph.input.append(onnx.helper.make_tensor_value_info("lr", 1, [4, 3]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("lr", 1, [4, 3]))
    assert "lr" in import_training_graph(model, GraphOptions(state={**STATE, "lr": "lr"})).variables


def test_a_variable_that_never_changes_gets_a_next_value_of_its_own() -> None:
    text = SGD.replace("=> (float loss,", "=> (float loss, float[8,3] t,")

    training = import_training_graph(
        with_zeros(parse(text), "W", "t"), GraphOptions(state={**STATE, "t": "t"})
    )

    assert training.variables["t"].next == "t/kept"
    assert training.graph.nodes[-1].op in ("Identity", "Sub")


def test_outputs_that_are_left_out_have_names_of_their_own() -> None:
    text = SGD.replace(
        "W_next = Sub (W, part)",
        """flat = Constant <value = int64[1] {-1}> ()
        row = Reshape (loss, flat)
        once, first, inverse, counts = Unique (row)
        count = CastLike (inverse, loss)
        scaled = Div (part, count)
        W_next = Sub (W, scaled)""",
    )
    model = with_zeros(parse(text), "W")
    unique = next(node for node in model.graph.node if node.op_type == "Unique")
    unique.output[:] = [unique.output[0], "", unique.output[2], ""]

    training = import_training_graph(model, GraphOptions(state=STATE))

    (node,) = (node for node in training.graph.nodes if node.op == "Unique")
    assert len(node.outputs) == 3
    assert all(tensor.name for node in training.graph.nodes for tensor in node.outputs)


def test_subgraphs_survive() -> None:
    text = SGD.replace(
        "W_next = Sub (W, part)",
        """zero = Constant <value = float {0.0}> ()
        fine = Greater (loss, zero)
        W_next = If (fine) <then_branch = a () => (float[4,3] r) { r = Sub (W, part) },
                            else_branch = b () => (float[4,3] s) { s = Identity (W) }>""",
    )
    training = import_step(text)

    (function,) = training.functions
    assert training.graph.nodes[-1].op == function.name
    assert [node.op_type for node in function.node] == ["If"]


def test_the_source_says_all_that_is_known() -> None:
    training = import_step(SGD)
    training.gradients["W"] = Gradient("W", dense="dW")

    bindings = read_bindings(onnx.ModelProto.FromString(annotated_source(training)), None)

    assert msgspec.to_builtins(bindings) == {
        "state": STATE,
        "loss": "loss",
        "gradients": {"W": {"dense": "dW"}},
        "sample_axes": {"x": 0, "t": 0},
    }


def test_a_model_that_cannot_be_converted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no adapter")

    monkeypatch.setattr(onnx.version_converter, "convert_version", refuse)

    with pytest.raises(UnsupportedModel, match="fix: export the model with opset 21"):
        import_training_graph(with_zeros(parse(SGD, opset=18), "W"), GraphOptions(state=STATE))


def initialize(model: onnx.ModelProto, maker: str) -> None:
    training = model.training_info.add()
    text = f"initial () => (float[4,3] W0) {{ {maker} }}"
    training.initialization.CopyFrom(onnx.parser.parse_graph(text))
    training.initialization_binding.add(key="W", value="W0")


MAKERS = {
    "constant": "n = Constant <value = int64[2] {4, 3}> () W0 = ConstantOfShape <value = float[1] {2}> (n)",
    "stored": "W0 = Constant <value_floats = [1.0, 2.0]> ()",
    "normal": "W0 = RandomNormal <shape = [4, 3], mean = 0.0, scale = 0.1, seed = 2.0> ()",
    "uniform": "W0 = RandomUniform <shape = [4, 3], low = 0.0, high = 0.1, seed = 2.0> ()",
}


@pytest.mark.parametrize("has_value", [True, False])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_maker_of_initial_values_is_read_or_refused_whatever_its_attributes_are(
    maker: str, has_value: bool
) -> None:
    model = parse(SGD)
    initialize(model, MAKERS[maker])
    made = model.training_info[0].initialization.node
    attributes = [(place, number) for place, node in enumerate(made) for number in range(len(node.attribute))]
    for (place, number), type_number in product(attributes, range(15)):
        damaged = onnx.ModelProto.FromString(model.SerializeToString())
        attribute = damaged.training_info[0].initialization.node[place].attribute[number]
        attribute.type = type_number  # type: ignore[assignment]
        for field in ("t", "f", "ints", "floats") if not has_value else ():
            attribute.ClearField(field)  # type: ignore[arg-type]
        with suppress(PartcError):
            check_model(damaged)
            import_training_graph(damaged, GraphOptions(state=STATE))


def test_a_data_input_of_text_is_refused() -> None:
    step = parse("""
    step (string[8] words, float[8,4] x, float[4] W) => (float loss, string[8] known, float[4] W_next) {
        known = StringConcat (words, words)
        h = Mul (x, W)
        loss = ReduceSum <keepdims = 0> (h)
        W_next = Identity (W)
    }
    """)

    with pytest.raises(UnsupportedModel, match="turn text into ids"):
        import_training_graph(with_zeros(step, "W"), GraphOptions(state=STATE))


def test_bindings_that_are_no_text_are_refused() -> None:
    model = onnx.ModelProto()
    model.metadata_props.add(key=METADATA_KEY, value="{}#")
    damaged = onnx.ModelProto.FromString(model.SerializeToString().replace(b"{}#", b"{\xff#"))

    with pytest.raises(BadModel, match="bindings that cannot be read"):
        read_bindings(damaged, None)


@pytest.mark.parametrize("name", ["x", "W"])
def test_an_input_has_the_type_that_it_declares_whatever_value_info_says(name: str) -> None:
    model = with_zeros(parse(SGD), "W")
    model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, [32]))

    training = import_training_graph(model, GraphOptions(state=STATE))

    plain = import_training_graph(with_zeros(parse(SGD), "W"), GraphOptions(state=STATE))
    facts, expected = infer_facts(training, {}), infer_facts(plain, {})
    assert (facts.shapes, facts.dtypes) == (expected.shapes, expected.dtypes)


SEQUENCE = """
step (float[8,3,4] x, int64 at, float[4] W) => (float loss, float[4] W_next) {
    pieces = SplitToSequence <axis = AXIS> (x)
    first = Constant <value_int = 0> ()
    piece = SequenceAt (pieces, PLACE)
    h = Mul (piece, W)
    loss = ReduceSum <keepdims = 0> (h)
    W_next = Sub (W, loss)
}
"""


def test_pieces_of_a_sequence_are_tensors() -> None:
    step = with_zeros(parse(SEQUENCE.replace("AXIS", "1").replace("PLACE", "first")), "W")

    training = import_training_graph(step, GraphOptions(state=STATE))

    assert [node.op for node in training.graph.nodes][:2] == ["Split", "Mul"]
    assert infer_facts(training, {}).shape("h") == (8, 1, 4)


def test_a_piece_whose_place_is_data_is_refused() -> None:
    step = with_zeros(parse(SEQUENCE.replace("AXIS", "1").replace("PLACE", "at")), "W")

    with pytest.raises(UnsupportedModel, match="their lengths and positions are constants") as refused:
        import_training_graph(step, GraphOptions(state=STATE))
    assert "SequenceAt" in refused.value.at


def step_with(nodes: str, output: str) -> onnx.ModelProto:
    """Return a step that makes another output by nodes that may read sequences `s` and `q`."""
    return parse(
        f"""step (float[8,6] x, float[6] W) => (float loss, float[6] W_next, {output}) {{
            a = Mul (x, W) three = Constant <value_int = 3> () zero = Constant <value_int = 0> ()
            s = SplitToSequence <axis = -1> (a, three) q = SequenceConstruct (a, x)
            loss = ReduceMean <keepdims = 0> (a) W_next = Sub (W, loss) b = Cast <to = 9> (loss) {nodes}
        }}"""
    )


@pytest.mark.parametrize(
    ("nodes", "output"),
    [
        ("", "seq(float[8,3]) s"),
        ("u = Identity (s)", "seq(float[8,3]) u"),
        ("u = Optional (a)", "optional(float[8,6]) u"),
        (
            "u = If (b) <then_branch = f () => (seq(float) n) { n = SequenceConstruct (x) }, "
            "else_branch = g () => (seq(float) k) { k = SequenceConstruct (a, x) }>",
            "seq(float) u",
        ),
    ],
)
def test_sequences_that_a_step_returns_are_refused(nodes: str, output: str) -> None:
    with pytest.raises(UnsupportedModel, match="returns a sequence") as refused:
        import_training_graph(step_with(nodes, output), GraphOptions(state=STATE), needs_initial=False)

    assert refused.value.at == f"output {output[-1]!r}"
    assert "ConcatFromSequence" in refused.value.fix


@pytest.mark.parametrize(
    ("nodes", "op_type"),
    [
        (
            "t = If (b) <then_branch = f () => (float[8,6] n) { n = SequenceAt (q, zero) }, "
            "else_branch = g () => (float[8,6] k) { k = Identity (x) }>",
            "If",
        ),
        (
            "r = Loop (three, b, s) <body = f (int64 i, bool c, seq(float[8,3]) p) => "
            "(bool d, seq(float[8,3]) n) { d = Identity (c) n = SequenceInsert (p, x) }> "
            "t = ConcatFromSequence <axis = 1> (r)",
            "Loop",
        ),
        ("e = SequenceEmpty () t = ConcatFromSequence <axis = 0> (e)", "ConcatFromSequence"),
    ],
)
def test_sequences_that_cannot_be_written_as_tensors_are_named_with_their_reader(
    nodes: str, op_type: str
) -> None:
    step = step_with(nodes, "float[c,d] t")

    with pytest.raises(UnsupportedModel, match=f"those of {op_type} are not") as refused:
        import_training_graph(step, GraphOptions(state=STATE), needs_initial=False)

    assert refused.value.at.endswith(f"({op_type})")
