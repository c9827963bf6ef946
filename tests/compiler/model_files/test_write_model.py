"""A model is written at once or not at all; weights are read one at a time, and lie beside a large one."""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

from partc.compiler.model_files import write_model as module
from partc.compiler.model_files.model_file import read_model
from partc.compiler.model_files.write_model import write_model
from partc.runtime.data.checkpoint import TensorFile
from tests.builders.graphs.foreign_steps import SGD, parse

GRAPH = "graph (float[2] x) => (float[2] y) {{ {} }}"
WEIGHTS = "graph (float[4] x) => (float[3] y) { h = MatMul (x, W) g = Mul (h, s) y = Cast <to = 1> (g) }"


def test_a_written_model_reads_back(tmp_path: Path) -> None:
    write_model(parse(SGD), tmp_path / "deep" / "model.onnx")

    assert read_model(tmp_path / "deep" / "model.onnx") == parse(SGD)
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["model.onnx"]


def test_a_large_model_keeps_its_initializers_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXTERNAL_DATA_FROM_BYTES", 1000)
    model = parse(GRAPH.format("y = Add (x, big)"))
    model.graph.initializer.append(numpy_helper.from_array(np.arange(2000, dtype=np.float32), "big"))

    write_model(model, tmp_path / "m.onnx")

    read = read_model(tmp_path / "m.onnx")
    assert read.graph.initializer[0].data_location == onnx.TensorProto.EXTERNAL
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]


def test_a_failed_write_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    write_model(parse(SGD), path)
    monkeypatch.setattr(module.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))

    with pytest.raises(OSError, match="disk full"):
        write_model(parse(GRAPH.format("y = Relu (x)")), path)

    assert read_model(path) == parse(SGD)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("limit_bytes", [10**9, 50])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_weights_are_read_when_they_are_written(
    limit_bytes: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXTERNAL_DATA_FROM_BYTES", limit_bytes)
    monkeypatch.setattr(module, "EXTERNAL_FROM_BYTES", 8)
    arrays = {"W": np.arange(12, dtype=dtype).reshape(4, 3), "s": np.array(0.5, dtype)}
    model = parse(
        WEIGHTS.replace(
            "float[4]", f"{'float' if dtype == 'float32' else dtype.replace('float64', 'double')}[4]"
        )
    )
    model.graph.initializer.append(numpy_helper.from_array(np.arange(100, dtype=np.float32), "large"))
    read: list[str] = []

    def piece(name: str) -> Iterator[np.ndarray]:
        read.append(name)
        yield arrays[name]

    weights = [TensorFile(name, dtype, array.shape, piece(name)) for name, array in arrays.items()]
    assert read == []
    write_model(model, tmp_path / "m.onnx", weights)

    assert read == ["W", "s"]
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
    beside = [tmp_path / "m.onnx.data"] * (limit_bytes == 50)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "m.onnx", *beside]
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": np.ones(4, dtype)})
    np.testing.assert_array_equal(result, (0.5 * arrays["W"].sum(0)).astype(np.float32))
    loaded = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    np.testing.assert_array_equal(loaded["large"], np.arange(100, dtype=np.float32))


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXTERNAL_DATA_FROM_BYTES", 1)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(module, "write_pieces", lambda *_: (_ for _ in ()).throw(full))
    weight = TensorFile("W", "float32", (4, 3), (np.ones((4, 3), np.float32),))

    with pytest.raises(OSError, match="No space left") as refused:
        write_model(parse(WEIGHTS), tmp_path / "m.onnx", [weight])

    assert refused.value.filename == str(tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_a_pipe_takes_the_model_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_bytes)

        write_model(parse(SGD), pipe)

        assert onnx.load_model_from_string(read.result(timeout=60)) == parse(SGD)
    assert pipe.is_fifo()


def test_what_a_link_points_at_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link.onnx").symlink_to(tmp_path / "m.onnx")

    write_model(parse(SGD), tmp_path / "link.onnx")

    assert (tmp_path / "link.onnx").is_symlink()
    assert read_model(tmp_path / "m.onnx") == parse(SGD)
