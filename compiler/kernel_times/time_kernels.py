"""Time kernels one after the other, in a process of their own: `python -m` this, keys in, seconds out.

    {"key": "MatMul(..)"}      ->      {"key": "MatMul(..)", "seconds": 1.7e-4}
                               or      {"key": "MatMul(..)", "unmeasured": "ONNX Runtime refuses it: .."}

A kernel is timed as decision 25 prices it: what it reads and writes comes from memory, but for what is hot.
A session runs copies of the kernel on operands of their own, as many as make COLD_BYTES, each of which so
finds the caches full of others' data. What starting any node takes, and the session, is that of as many nodes
that compute nothing, and is taken off.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from partc.compiler.kernel_times.kernel_models import CannotRun, KernelLibrary, feeds_of
from partc.passes.scheduling.kernels import Kernel, Operand, parse_kernel
from partc.runtime.execution.device import INEXACT_IN_DOUBLE, UNSOUND, ExecutionDevice, open_session

COLD_BYTES = 64 * 2**20  # twice the last cache of the machine of decision 25
MOST_COPIES = 32
MOST_BYTES = 2**30  # of all copies together
WARM_UP = 2
LEAST_RUNS, MOST_RUNS = 5, 40
ENOUGH_S = 0.05  # of runs, where there were enough of them

READY = "ready"  # the first line of the output
NOTHING = Kernel("", "Neg", (Operand("float32", (1,)),))


class KernelRequest(msgspec.Struct, frozen=True):
    """A kernel to be timed."""

    key: str


class Answer(msgspec.Struct, frozen=True):
    """Its seconds, or why it has none."""

    key: str
    seconds: float | None = None
    unmeasured: str = ""


class Setting(msgspec.Struct, frozen=True):
    """What is measured on, and a model that holds the functions that kernels may call.

    Models of kernels are written beside that one: whoever measures removes them, for this process is killed.
    """

    kind: str
    index: int
    threads: int
    functions: str

    @property
    def device(self) -> ExecutionDevice:
        """Return the device."""
        return ExecutionDevice("gpu" if self.kind == "gpu" else "cpu", self.index, self.threads)


class Timer:
    """Times kernels on a device."""

    def __init__(self, library: KernelLibrary, device: ExecutionDevice, folder: Path) -> None:
        self._library, self._device, self._path = library, device, folder / "kernel.onnx"
        self._nothing_s: dict[int, float] = {}  # copies -> of a session that computes nothing

    def seconds(self, key: str) -> float:
        """Return the seconds of a kernel. Raises CannotRun."""
        try:
            kernel = parse_kernel(key)
            once = self._prepare(kernel, 1)
            once()
            copies = max(1, min(MOST_COPIES, -(-COLD_BYTES // once.nbytes), MOST_BYTES // once.nbytes))
            run = once if copies == 1 else self._prepare(kernel, copies)
            return max(0.0, (_median_s(run) - self._nothing(copies)) / copies)
        except CannotRun:
            raise
        except Exception as error:  # ONNX Runtime's and graphsurgeon's errors share no narrower class
            raise CannotRun(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}") from error

    def _nothing(self, copies: int) -> float:
        if copies not in self._nothing_s:
            self._nothing_s[copies] = _median_s(self._prepare(NOTHING, copies))
        return self._nothing_s[copies]

    def _prepare(self, kernel: Kernel, copies: int) -> "_BoundCopies":
        model = self._library.model(kernel, copies)
        onnx.save(model, self._path)
        in_double = any(isinstance(o, Operand) and o.dtype == "float64" for o in kernel.operands)
        session = open_session(
            self._path, self._device, (*UNSOUND, *(INEXACT_IN_DOUBLE if in_double else ()))
        )
        return _BoundCopies(session, self._device, kernel, copies)


class _BoundCopies:
    """Copies of a kernel, bound to operands: the same ones where they are hot, else each to its own."""

    def __init__(
        self, session: ort.InferenceSession, device: ExecutionDevice, kernel: Kernel, copies: int
    ) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._kept: list[tuple[np.ndarray, ort.OrtValue]] = []
        names = {entry.name for entry in session.get_inputs()}
        values = feeds_of(kernel, np.random.default_rng(0))
        for place, (operand, value) in enumerate(zip(kernel.operands, values, strict=True)):
            if value is None or not isinstance(operand, Operand):
                continue
            shared = device.place(value)
            self._kept.append((value, shared))
            for copy in range(copies):
                bound = shared if operand.is_hot or copy == 0 else self._place(device, value.copy())
                if (name := f"c{copy}.{place}") in names:
                    self._binding.bind_ortvalue_input(name, bound)
        shared_results: dict[str, ort.OrtValue] = {}
        for output in session.get_outputs():
            result = output.name.partition(".")[2]
            if kernel.is_hot and result not in shared_results:
                zeros = np.zeros(output.shape, helper.tensor_dtype_to_np_dtype(_ELEMENTS[output.type]))
                shared_results[result] = self._place(device, zeros)
            if kernel.is_hot:
                self._binding.bind_ortvalue_output(output.name, shared_results[result])
            else:
                self._binding.bind_output(output.name, device.memory, device.index)

    def _place(self, device: ExecutionDevice, value: np.ndarray) -> ort.OrtValue:
        self._kept.append((value, device.place(value)))
        return self._kept[-1][1]

    def __call__(self) -> None:
        """Run them."""
        self._session.run_with_iobinding(self._binding)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all operands and results of the last run that are not hot twice."""
        results: int = sum(value.tensor_size_in_bytes() for value in self._binding.get_outputs())
        return results + sum(value.nbytes for value, _ in self._kept)


def _median_s(run: Callable[[], None]) -> float:
    for _ in range(WARM_UP):
        run()
    times: list[float] = []
    while len(times) < LEAST_RUNS or (sum(times) < ENOUGH_S and len(times) < MOST_RUNS):
        begun_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun_s)
    return median(times)


_ELEMENTS = {
    f"tensor({name})": element
    for name, element in {
        "float": onnx.TensorProto.FLOAT,
        "double": onnx.TensorProto.DOUBLE,
        "float16": onnx.TensorProto.FLOAT16,
        "bfloat16": onnx.TensorProto.BFLOAT16,
        "int32": onnx.TensorProto.INT32,
        "int64": onnx.TensorProto.INT64,
        "bool": onnx.TensorProto.BOOL,
    }.items()
}


def main() -> None:
    """Answer every line of the standard input with one on the standard output, until it ends."""
    setting = msgspec.json.decode(sys.argv[1], type=Setting)
    functions_model = onnx.load(setting.functions)
    library = KernelLibrary(
        functions_model.opset_import[0].version,
        {f.name: f for f in functions_model.functions},
        setting.kind == "cpu",
    )
    print(READY, flush=True)
    timer = Timer(library, setting.device, Path(setting.functions).parent)
    for line in sys.stdin:
        key = msgspec.json.decode(line, type=KernelRequest).key
        try:
            answer = Answer(key, timer.seconds(key))
        except CannotRun as error:
            answer = Answer(key, unmeasured=str(error))
        print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    main()
