"""Segments on a device: ONNX Runtime sessions whose inputs and outputs stay where they are.

On a CPU every value is host memory, on a GPU all are the device's: ONNX Runtime copies an input when it is
bound and an output when a run ends, where a kernel wants them elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

from partc.runtime.errors import BadPlan, RankFailed, UnsupportedModel
from partc.runtime.execution.arrays import HOST_ARRAYS, DeviceArrays, gpu_arrays
from partc.runtime.execution.gpus import load_cuda
from partc.runtime.log import log
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Plan, Rank, Run

# Keeps the scale of a product of float64 matrices as a float32 attribute (onnxruntime 1.31.1).
INEXACT_IN_DOUBLE = ("MatMulScaleFusion",)
# Makes a quotient of a product with a reciprocal, and forgets who made the dividend: where that node is then
# removed, the graph is refused (onnxruntime 1.31.1, its issue 32413). Segments hold no such product.
# FuseReluClip refuses graphs in which neither float32 nor float16 is clipped.
UNSOUND = ("DivMulFusion", "FuseReluClip")
# Multiplies by a vector wrongly where the matrix is transposed (onnxruntime 1.31.1). Segments have none of
# these (compiler/model_files/widen_vectors.py); models that are run as they came may.
WRONG_OF_VECTORS = ("MatmulTransposeFusion",)
# Outputs that it finds to be constants are copied in every run, which no CUDA graph records.
FOLDS_OUTPUTS = ("ConstantFolding",)
# Which value may have the memory of an earlier one, ONNX Runtime finds in a time that grows with the square
# of the nodes (1.31.1). Segments of more do without, and give each value its own while it is in use.
REUSING_NODES = 2_000
_AS_REQUESTED = 1  # onnxruntime's kSameAsRequested
_ERROR, _FATAL = 3, 4  # severities of onnxruntime's log
_PLACEHOLDER = np.zeros((), np.float32)


@dataclass(frozen=True, slots=True)
class ExecutionDevice:
    """Where one rank's segments run."""

    kind: Literal["cpu", "gpu"]
    index: int
    threads: int

    @property
    def memory(self) -> str:
        """ONNX Runtime's name of the device's memory."""
        return "cuda" if self.kind == "gpu" else "cpu"

    @property
    def arrays(self) -> DeviceArrays:
        """Return what makes arrays on the device. Raises ImportError for a GPU without CuPy."""
        return gpu_arrays(self.index) if self.kind == "gpu" else HOST_ARRAYS

    def place(self, array: np.ndarray) -> ort.OrtValue:
        """Return a tensor on the device: the very memory of `array` on a CPU, a copy on a GPU."""
        return self.arrays.tensor(self.arrays.placed(array))


CPU = ExecutionDevice("cpu", 0, 1)


def device_of(rank: Rank) -> ExecutionDevice:
    """Return the device that a rank is bound to."""
    return ExecutionDevice(rank.kind, rank.device_index, rank.threads)


class Sessions:
    """The sessions of a plan's segments, each loaded once per device and thread count."""

    def __init__(self, folder: PlanFolder) -> None:
        self._folder = folder.path
        self._disabled = disabled_optimizers(folder.plan)
        self._sessions: dict[tuple[str, ExecutionDevice], ort.InferenceSession] = {}
        self._recording: dict[tuple[str, ExecutionDevice], ort.InferenceSession | None] = {}

    def session(self, run: Run, device: ExecutionDevice) -> ort.InferenceSession:
        """Return the session that executes `run`, loading it if need be. Raises BadPlan, RankFailed."""
        threads = 1 if run.one_thread else device.threads
        key = (run.segment, ExecutionDevice(device.kind, device.index, threads))
        if key not in self._sessions:
            is_small = run.nodes <= REUSING_NODES
            self._sessions[key] = _load(self._folder / run.segment, key[1], self._disabled, is_small)
            log.debug("%s loaded on %s", run.segment, key[1])
        return self._sessions[key]

    def recording_session(self, run: Run, device: ExecutionDevice) -> ort.InferenceSession | None:
        """Return one that records a CUDA graph, None for a CPU, and where nodes have no kernels of CUDA's."""
        if device.kind == "cpu":
            return None
        key = (run.segment, device)
        if key not in self._recording:
            path = self._folder / run.segment
            try:
                disabled = (*self._disabled, *FOLDS_OUTPUTS)
                self._recording[key] = open_session(path, device, disabled, records=True)
            except Exception as error:  # onnxruntime's errors share no narrower class
                log.debug("%s is not recorded: %s", run.segment, error)
                self._recording[key] = None
        return self._recording[key]


def disabled_optimizers(plan: Plan) -> tuple[str, ...]:
    """Return ONNX Runtime's rewritings that a plan's segments go without."""
    in_double = any(variable.dtype == "float64" for variable in plan.variables)
    return (*UNSOUND, *INEXACT_IN_DOUBLE) if in_double else UNSOUND


def open_session(
    path: Path,
    device: ExecutionDevice,
    disabled: tuple[str, ...],
    *,
    records: bool = False,
    reuses_memory: bool = True,
) -> ort.InferenceSession:
    """Open a segment. Raises onnxruntime's errors, NoKernel among them.

    disabled       names of rewritings
    records        its runs become CUDA graphs, refused where they cannot
    reuses_memory  on a CPU, values are given the memory of others that are read no more (see REUSING_NODES)
    """
    options, providers = _options(device), _providers(device, records)
    options.enable_mem_reuse = reuses_memory or device.kind == "gpu"
    if records:
        options.log_severity_level = _FATAL  # a refusal is an answer
        options.enable_mem_pattern = False  # memory for it is taken in the second run, which is recorded
    return ort.InferenceSession(str(path), options, providers=providers, disabled_optimizers=list(disabled))


def _load(
    path: Path, device: ExecutionDevice, disabled: tuple[str, ...], reuses_memory: bool
) -> ort.InferenceSession:
    try:
        session = open_session(path, device, disabled, reuses_memory=reuses_memory)
    except NoKernel as error:
        raise UnsupportedModel(
            f"ONNX Runtime refuses a segment: {error}",
            at=str(path),
            fix="convert the model to an element type that the op has a kernel for, such as float32",
        ) from error
    except Exception as error:  # onnxruntime's errors share no narrower class
        raise BadPlan(
            f"ONNX Runtime refuses a segment: {error}", at=str(path), fix="compile the model again"
        ) from error
    if device.kind == "gpu" and "CUDAExecutionProvider" not in session.get_providers():
        raise RankFailed(
            "ONNX Runtime's CUDA provider does not start",
            at=f"GPU {device.index}",
            fix="see `partc doctor`, or compile for CPU devices",
        )
    return session


def _check_names(run: Run, session: ort.InferenceSession) -> None:
    """Raise BadPlan unless a run gives a segment its inputs, and takes none but its outputs."""
    inputs = {info.name for info in session.get_inputs()}
    outputs = {info.name for info in session.get_outputs()}
    reads, writes = {name for name, _ in run.reads}, {name for name, _ in run.writes}
    if wrong := sorted((reads ^ inputs) | (writes - outputs)):
        raise BadPlan(
            f"the plan and a segment do not agree about {wrong[0]!r}",
            at=run.segment,
            fix="compile the model again",
        )


def _check_shape(run: Run, value: str, shape: list[int], expected: list[int | str | None]) -> None:
    """Raise BadPlan unless a value has the shape that a segment reads."""
    fits = len(shape) == len(expected) and all(
        not isinstance(size, int) or size == actual for size, actual in zip(expected, shape, strict=True)
    )
    if not fits:
        raise BadPlan(
            f"value {value!r} has shape {shape}, the segment reads {expected}",
            at=run.segment,
            fix="compile the model again",
        )


# Else DequantizeLinear and MatMul become one op that computes in 8 bits, a thousandth off.
EXACT = ("session.disable_quant_qdq", "1")


def _options(device: ExecutionDevice) -> ort.SessionOptions:
    _share_arena()
    if device.kind == "gpu":
        load_cuda()
        # Of every session it would warn that CUDA's provider, which is built in, is no plugin.
        ort.set_default_logger_severity(_ERROR)
    options = ort.SessionOptions()
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.intra_op_num_threads = device.threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry(*EXACT)
    options.log_severity_level = _ERROR
    # The pattern that it learns in the first run is allocated beside the arena that this run left: on a
    # CPU 0.75 GB of 2.72 more for ResNet-50 at batch 8, 1.6 of 6.7 for GPT-2, at the same speed.
    options.enable_mem_pattern = device.kind == "gpu"
    return options


@cache
def _share_arena() -> None:
    """Let all sessions of this process take host memory from one arena that grows as asked.

    Segments run one after the other: what one leaves serves the next. By itself ONNX Runtime gives every
    session an arena of its own, which grows by powers of two.
    """
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg({"arena_extend_strategy": _AS_REQUESTED}))


def _providers(device: ExecutionDevice, records: bool) -> list[str | tuple[str, dict[str, int]]]:
    if device.kind == "cpu":
        return ["CPUExecutionProvider"]
    # TF32, which is its default, keeps 10 bits of a float32's 23.
    options = {"device_id": device.index, "use_tf32": 0, "enable_cuda_graph": int(records)}
    return [("CUDAExecutionProvider", options), "CPUExecutionProvider"]


def names_on_host(session: ort.InferenceSession) -> set[str]:
    """Return a session's inputs and outputs that lie in host memory, whatever they are bound to."""
    inputs = zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
    outputs = zip(session.get_outputs(), session.get_output_memory_infos(), strict=True)
    return {value.name for value, memory in (*inputs, *outputs) if memory.name != "Cuda"}


class Values(Protocol):
    """What a segment needs of an environment."""

    @property
    def tensors(self) -> dict[str, ort.OrtValue]:
        """Every value that exists now."""

    @property
    def fixed(self) -> Mapping[str, ort.OrtValue]:
        """The values whose memory never moves: slices of buffers, variables, constants."""


class BoundRun:
    """One Run instruction, its fixed values bound once and the others at every call.

    Nothing but the environment keeps a moving value alive between calls.
    """

    def __init__(
        self,
        run: Run,
        session: ort.InferenceSession,
        device: ExecutionDevice,
        values: Values,
        options: ort.RunOptions | None = None,
    ) -> None:
        _check_names(run, session)
        self._session = session
        self._options = options
        self._device = device
        self._values = values
        self._binding = session.io_binding()
        self._placeholder = device.place(_PLACEHOLDER)
        on_host = names_on_host(session) if device.kind == "gpu" else set()
        # What a kernel reads in host memory is copied there when it is bound.
        self._moving_reads = [pair for pair in run.reads if pair[1] not in values.fixed or pair[0] in on_host]
        self._unplaced = [pair for pair in run.writes if pair[1] not in values.fixed]
        self._run = run
        self._wanted = {info.name: info.shape for info in session.get_inputs()}
        for name, value in run.reads:
            if value in values.fixed:
                _check_shape(run, value, values.fixed[value].shape(), self._wanted[name])
            if value in values.fixed and name not in on_host:
                self._binding.bind_ortvalue_input(name, values.fixed[value])
        fixed_writes = [pair for pair in run.writes if pair[1] in values.fixed]
        declared = {output.name: output.shape for output in session.get_outputs()}
        for name, value in fixed_writes:
            self._bind_fixed_output(name, values.fixed[value], declared[name])
        self._first_unplaced = len(fixed_writes)
        self._release_outputs()

    def __call__(self) -> None:
        """Execute the segment on the values of now. Raises BadPlan where a value has another shape."""
        tensors = self._values.tensors
        for name, value in self._moving_reads:
            self._binding.bind_ortvalue_input(name, tensors[value])
        try:
            self._session.run_with_iobinding(self._binding, self._options)
        except RuntimeError:
            for name, value in self._moving_reads:
                _check_shape(self._run, value, tensors[value].shape(), self._wanted[name])
            raise
        if self._unplaced:
            results = self._binding.get_outputs()[self._first_unplaced :]
            tensors.update(zip((value for _, value in self._unplaced), results, strict=True))
            self._release_outputs()
        for name, _ in self._moving_reads:
            self._binding.bind_ortvalue_input(name, self._placeholder)

    def _bind_fixed_output(self, name: str, value: ort.OrtValue, declared: list[int | str | None]) -> None:
        """Bind a value's memory, in the shape that the segment declares if it is another one of that size."""
        sizes = [size for size in declared if isinstance(size, int)]
        shape = value.shape()
        if sizes == shape or prod(sizes) != prod(shape) or len(sizes) < len(declared):
            self._binding.bind_ortvalue_output(name, value)
            return
        memory, index, element = self._device.memory, self._device.index, value.element_type()
        self._binding.bind_output(name, memory, index, element, sizes, value.data_ptr())

    def _release_outputs(self) -> None:
        for name, _ in self._unplaced:
            self._binding.bind_output(name, self._device.memory, self._device.index)
