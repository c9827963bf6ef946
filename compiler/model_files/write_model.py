"""Write model files: at once or not at all, large values beside them, and weights that are not in memory."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import onnx
from onnx import external_data_helper, helper

from partc.runtime.data.checkpoint import TensorFile, write_pieces
from partc.runtime.errors import naming_file
from partc.runtime.jobs.job_folder import held_folder

EXTERNAL_DATA_FROM_BYTES = 1_500_000_000  # larger models keep their initializers beside the file
EXTERNAL_FROM_BYTES = 1024  # of a large model: what is smaller stays within
PAGE_BYTES = 4096  # where weights begin in a file beside the model: runtimes map them


def write_model(model: onnx.ModelProto, path: str | Path, weights: Sequence[TensorFile] = ()) -> None:
    """Write a model file at once or not at all; initializers go beside it above 1.5 GB, and out of `model`.

    `weights`: further initializers, each read when it is written. A device or a pipe takes what comes.
    Raises OSError, which names the file.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        _write_one(model, path, weights)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with held_folder(path.parent, f".{path.name}.write-") as temporary:
        folder = temporary / "model"
        folder.mkdir()
        with naming_file(path):
            _write(model, folder / path.name, weights)
        # The model comes last: whoever sees it finds its data in place.
        for file in sorted(folder.iterdir(), key=lambda file: file.name == path.name):
            os.replace(file, path.parent / file.name)


def _write(model: onnx.ModelProto, path: Path, weights: Sequence[TensorFile]) -> None:
    if model.ByteSize() + sum(weight.nbytes for weight in weights) > EXTERNAL_DATA_FROM_BYTES:
        beside = path.with_name(f"{path.name}.data")
        external_data_helper.convert_model_to_external_data(
            model, location=beside.name, size_threshold=EXTERNAL_FROM_BYTES
        )
        model = external_data_helper.write_external_data_tensors(model, str(path.parent))
        with beside.open("ab") as stream:
            model.graph.initializer.extend(_append(weight, stream, beside.name) for weight in weights)
        path.write_bytes(model.SerializeToString(deterministic=True))
    else:
        _write_one(model, path, weights)


def _write_one(model: onnx.ModelProto, path: Path, weights: Sequence[TensorFile]) -> None:
    model.graph.initializer.extend(map(_within, weights))
    path.write_bytes(model.SerializeToString(deterministic=True))


def _append(weight: TensorFile, stream: BinaryIO, location: str) -> onnx.TensorProto:
    """Write a weight to the end of a file, and return the initializer that names its place there."""
    stream.write(bytes(-stream.tell() % PAGE_BYTES))
    begin = stream.tell()
    write_pieces(stream, weight)
    tensor = _initializer(weight)
    tensor.raw_data = b""  # it has its data as raw bytes, says the format, if elsewhere
    external_data_helper.set_external_data(tensor, location, begin, weight.nbytes)
    tensor.ClearField("raw_data")
    return tensor


def _within(weight: TensorFile) -> onnx.TensorProto:
    tensor = _initializer(weight)
    tensor.raw_data = b"".join(piece.tobytes() for piece in weight.pieces)
    return tensor


def _initializer(weight: TensorFile) -> onnx.TensorProto:
    kind = helper.np_dtype_to_tensor_dtype(weight.element_type)
    return onnx.TensorProto(name=weight.name, dims=weight.shape, data_type=kind)
