import hashlib
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

from partc.runtime.data import initial as initial_module
from partc.runtime.data.initial import InitialValues
from partc.runtime.errors import BadData, BadPlan
from partc.runtime.plan.boxes import rows_box
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.variables import Box, Constant, Initial, Made, Normal, PlanVariable, Stored, Uniform
from tests.builders.plans.hand_made_plans import plan_of
from tests.builders.plans.random_boxes import indices, random_box, random_shape

RANGE = """
<ir_version: 10, opset_import: ["" : 21]>
first () => (float[6] values) {
    start = Constant <value = float {0.0}> ()
    limit = Constant <value = float {6.0}> ()
    delta = Constant <value = float {1.0}> ()
    values = Range (start, limit, delta)
}
"""


def values_of(
    folder: Path, initial: Initial, shape: tuple[int, ...], dtype: str = "float32"
) -> InitialValues:
    variable = PlanVariable("W", dtype, shape, initial, "parameter")
    return InitialValues(PlanFolder(plan_of([], [], variables=(variable,)), folder))


@pytest.mark.parametrize(
    "initial", [Constant(2.5), Normal(0.0, 1.0, 5), Uniform(-1.0, 1.0, 5), Stored("w.safetensors", "w")]
)
def test_shards_equal_the_rows_of_the_whole(tmp_path: Path, initial: Initial) -> None:
    save_file({"w": np.arange(24, dtype=np.float32).reshape(6, 4)}, tmp_path / "w.safetensors")
    values = values_of(tmp_path, initial, (6, 4))

    whole = values.part("W")

    assert whole.shape == (6, 4)
    for start, stop in ((0, 2), (2, 6), (3, 3)):
        assert values.part("W", rows_box((6, 4), start, stop)).tobytes() == whole[start:stop].tobytes()


INITIALS = [
    Constant(2.5),
    Normal(0.0, 1.0, 5),
    Uniform(-1.0, 1.0, 5),
    Stored("w.safetensors", "w"),
    Made("made.onnx", "values"),
]


@pytest.mark.parametrize("initial", INITIALS)
@pytest.mark.parametrize("seed", range(12))
def test_boxes_equal_the_same_elements_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, initial: Initial, seed: int
) -> None:
    monkeypatch.setattr(initial_module, "BLOCK_BYTES", 70)  # rows are drawn in several blocks
    rng = np.random.default_rng(seed)
    shape, factored = random_shape(rng)
    elements = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    save_file({"w": elements}, tmp_path / "w.safetensors")
    (tmp_path / "made.onnx").write_bytes(_made(elements).SerializeToString())
    values = values_of(tmp_path, initial, shape)
    whole = values.part("W")
    plan = plan_of([], [], variables=(PlanVariable("W", "float32", shape, initial, "parameter"),))
    given = InitialValues(PlanFolder(plan, tmp_path), {"W": elements})

    for _ in range(20):
        box = random_box(rng, factored)
        assert values.part("W", box).tobytes() == whole[np.ix_(*indices(box))].tobytes()
        np.testing.assert_array_equal(given.part("W", box), elements[np.ix_(*indices(box))])
        assert values.part("W", box).flags.writeable


def _made(elements: np.ndarray) -> onnx.ModelProto:
    value = onnx.numpy_helper.from_array(elements)
    node = onnx.helper.make_node("Constant", [], ["values"], value=value)
    output = onnx.helper.make_tensor_value_info("values", onnx.TensorProto.FLOAT, elements.shape)
    graph = onnx.helper.make_graph([node], "first", [], [output])
    return onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)])


def test_of_a_large_table_no_more_is_read_or_drawn_than_is_kept(tmp_path: Path) -> None:
    """Half the columns of 64 MB: 32 MB, and a block."""
    shape = (8192, 2048)
    save_file({"w": np.ones(shape, np.float32)}, tmp_path / "w.safetensors")
    half = Box(((8192,), (2, 1024)), (((0, 8192),), ((0, 2), (0, 512))))
    for initial in (Stored("w.safetensors", "w"), Normal(0.0, 1.0, 5)):
        values = values_of(tmp_path, initial, shape)
        tracemalloc.start()

        part = values.part("W", half)

        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert part.shape == (8192, 1024)
        assert peak_bytes < part.nbytes + 4 * initial_module.BLOCK_BYTES


def test_a_made_value_is_run_and_cut(tmp_path: Path) -> None:
    (tmp_path / "made.onnx").write_bytes(onnx.parser.parse_model(RANGE).SerializeToString())
    values = values_of(tmp_path, Made("made.onnx", "values"), (6,))

    np.testing.assert_array_equal(values.part("W", rows_box((6,), 2, 4)), [2, 3])
    np.testing.assert_array_equal(values.part("W"), np.arange(6))


def test_scalars_and_counters_have_their_shape_and_type(tmp_path: Path) -> None:
    counter = values_of(tmp_path, Constant(3), (), "int64").part("W")

    assert counter.shape == ()
    assert counter.dtype == np.int64
    assert values_of(tmp_path, Normal(0.0, 1.0, 5), ()).part("W").shape == ()


def test_a_stored_value_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_file({"w": np.zeros((2, 2), np.float32)}, tmp_path / "w.safetensors")

    with pytest.raises(BadPlan, match=r"float32\[2, 2\], not float32\[6, 4\]"):
        values_of(tmp_path, Stored("w.safetensors", "w"), (6, 4)).part("W")


def test_a_given_value_for_nothing_is_refused(tmp_path: Path) -> None:
    folder = PlanFolder(plan_of([], []), tmp_path)

    with pytest.raises(BadData, match=r"(?s)no variable of the plan.*give those that this one has"):
        InitialValues(folder, {"V": np.zeros(3)})


def test_a_large_table_is_made_shard_by_shard(tmp_path: Path) -> None:
    values = values_of(tmp_path, Normal(0.0, 1.0, 5), (800_000, 512))

    shard = values.part("W", rows_box((800_000, 512), 799_000, 799_010))

    assert hashlib.sha256(shard.tobytes()) != hashlib.sha256(
        values.part("W", rows_box((800_000, 512), 0, 10)).tobytes()
    )
    assert shard.shape == (10, 512)
