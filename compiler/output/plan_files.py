"""The folder of a plan: written beside its place, renamed when complete.

A failed compilation leaves nothing half-written, and never harms an earlier result: what a killed one wrote
is removed by the next of that name. Nothing is written into a folder that a training holds. Of an earlier
plan's folder only what that plan lists goes; whatever else lies there stays.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
import onnx

from partc.compiler.model_files.model_file import MODEL
from partc.compiler.output.output_paths import TRAINED_FILES, check_output_folder, files_of_earlier_plan
from partc.compiler.output.title_segments import SegmentTitle
from partc.passes.graph.training_graph import InitialValue, MadeTensor, StoredTensor, TrainingGraph
from partc.runtime.data.checkpoint import TensorFile, write_tensors
from partc.runtime.errors import BadUsage
from partc.runtime.jobs.job_folder import held_folder, locked_folder
from partc.runtime.log import log
from partc.runtime.plan.variables import Initial, Made, Stored

INITIAL = "initial.safetensors"


class PlanFiles:
    """A context: files are gathered in a temporary folder, which takes `out`'s place at the end."""

    def __init__(self, out: Path, force: bool = False) -> None:
        self._force = force
        self.out = out.resolve()  # a link to a folder stays a link
        self._initial: dict[str, StoredTensor] = {}
        self.segments_of: dict[str, list[SegmentTitle]] = {}  # of each node of the training graph

    def __enter__(self) -> "PlanFiles":
        check_output_folder(self.out, self._force)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as begun:
            begun.enter_context(locked_folder(self.out))
            temporary = begun.enter_context(held_folder(self.out.parent, f".{self.out.name}.compile-"))
            self.folder = temporary / "plan"
            (self.folder / "segments").mkdir(parents=True)
            self.folder.chmod(0o755)
            self._at_the_end = begun.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError):  # a write that fails on a full disk does not say where
            error.filename = error.filename or str(self.out)
        with self._at_the_end:
            if error is None:
                with (
                    locked_folder(self.out),
                    locked_folder(self.folder),
                ):
                    _swap(self.folder, self.out)

    def save_segment(self, model: onnx.ModelProto, name: str) -> str:
        """Store a segment under its name, which no other has."""
        data = model.SerializeToString(deterministic=True)
        path = f"segments/{name}.onnx"
        assert not (self.folder / path).exists(), f"two segments are called {name}"
        (self.folder / path).write_bytes(data)
        log.debug("%s: %d nodes, %d bytes", path, len(model.graph.node), len(data))
        return path

    def discard_segments(self) -> None:
        """Remove all segments: others take their place."""
        self.segments_of.clear()
        shutil.rmtree(self.folder / "segments")
        (self.folder / "segments").mkdir()

    def save_model(self, training: TrainingGraph) -> str:
        """Store the user's graph, without the variables' values."""
        (self.folder / MODEL).write_bytes(training.source)
        return MODEL

    def save_initial(self, name: str, initial: InitialValue) -> Initial:
        """Store a variable's first value, or how it is made."""
        if isinstance(initial, StoredTensor):
            self._initial[name] = initial
            return Stored(INITIAL, name)
        if isinstance(initial, MadeTensor):
            data = initial.model.SerializeToString(deterministic=True)
            path = f"initial/{hashlib.sha256(data).hexdigest()[:16]}.onnx"
            (self.folder / "initial").mkdir(exist_ok=True)
            (self.folder / path).write_bytes(data)
            return Made(path, initial.output)
        return initial

    def write_initial_values(self) -> None:
        """Write the first values of all variables that store them."""
        if self._initial:
            entries = [
                TensorFile(name, tensor.dtype.name, tensor.shape, _load_tensor(tensor))
                for name, tensor in sorted(self._initial.items())
            ]
            write_tensors(self.folder / INITIAL, entries)


def _load_tensor(tensor: StoredTensor) -> Iterator[np.ndarray]:
    """Read a tensor when its turn has come, so that one is in memory at a time."""
    yield tensor.load()


def _swap(folder: Path, out: Path) -> None:
    """Put `folder` in the place of `out`; what is not the earlier plan's moves over to it."""
    if not out.exists():
        folder.rename(out)
        return
    foreign_files = _files_of_others(out)
    if conflicts := [name for name in foreign_files if (folder / name).exists()]:
        raise BadUsage(
            f"a file that no plan of partc's wrote has the name of one: {conflicts[0]}",
            at=str(out / conflicts[0]),
            fix="move it away, or give another folder with -o",
        )
    # Outside of the temporary folder: were this process killed now, the next would remove the user's files.
    replaced = Path(tempfile.mkdtemp(prefix=f".{out.name}.replaced-", dir=out.parent))
    old = replaced / out.name
    out.rename(old)
    try:
        folder.rename(out)
    except OSError:
        old.rename(out)
        replaced.rmdir()
        raise
    for name in foreign_files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (old / name).rename(out / name)
    shutil.rmtree(replaced)


def _files_of_others(out: Path) -> list[str]:
    """Return the files, links and empty folders that neither the earlier plan nor its training made."""
    own_files = files_of_earlier_plan(out) or frozenset()
    foreign_files = [
        path for path in out.rglob("*") if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    ]
    names = [str(path.relative_to(out)) for path in foreign_files]
    return [name for name in names if name not in own_files and name not in TRAINED_FILES]
