"""Kernels are timed in a process of their own: what comes back, and what its end does."""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from partc.compiler.kernel_times import measure_kernels as measuring
from partc.compiler.kernel_times.kernel_models import CannotRun, KernelLibrary, feeds_of
from partc.compiler.kernel_times.list_kernels import StepKernels
from partc.compiler.kernel_times.measure_kernels import measure_kernels, source_here
from partc.compiler.kernel_times.time_kernels import Answer
from partc.passes.indexed_rows.indexed_slices import SUM_ROWS, sum_rows_function
from partc.passes.scheduling.kernels import body_of, parse_kernel
from partc.runtime.errors import RankFailed

CPU = ("cpu", "cpu-core", 1)
FUNCTIONS = {SUM_ROWS: sum_rows_function(17)}
STEP = StepKernels((), FUNCTIONS, 17)
BODY = body_of(SUM_ROWS, FUNCTIONS)

RUNNABLE = [
    "MatMul(float32[16,8], Transpose(float32[4,8], perm=[1, 0]))",
    "Add(float32[16,8], float32)",
    "hot(Mul(hot(float32[16,8]), 0))",
    "Greater(float64[16,8], float64)",
    "Gather(float32[5,4], int64[300])",
    "ScatterND(float32[5,4], int64[3,1], float32[3,4], reduction='add')",
    "GatherElements(float32[6,4], int64[6,1], axis=1)",
    "Conv(float32[1,2,5,5], float32[3,2,3,3], None, pads=[1, 1, 1, 1])",
    "Where(bool[16,8], float32[16,8], float32)",
    f"partc.{SUM_ROWS}(int64[30], float32[30,4], body='{BODY}')[2]",
]


def answers(keys: Sequence[str], seconds: float = 60.0) -> dict[str, Answer]:
    until_s = time.monotonic() + seconds
    return {answer.key: answer for answer in measure_kernels(keys, STEP, CPU, until_s)}


@pytest.mark.parametrize("key", RUNNABLE)
def test_copies_of_a_kernel_compute_what_numpy_does(key: str) -> None:
    kernel = parse_kernel(key)
    model = KernelLibrary(17, FUNCTIONS, on_cpu=True).model(kernel, copies=2)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values = feeds_of(kernel, np.random.default_rng(0))
    feeds = {f"c{c}.{place}": v for c in range(2) for place, v in enumerate(values) if v is not None}

    found = session.run(None, feeds)

    assert len(found) == 2 * kernel.results
    for first, second in zip(found[: kernel.results], found[kernel.results :], strict=True):
        np.testing.assert_array_equal(first, second)
    if kernel.op == "MatMul":
        np.testing.assert_allclose(found[0], values[0] @ values[1].T, rtol=1e-5)
    if kernel.op == "Mul":
        np.testing.assert_allclose(found[0], values[0] * values[0], rtol=1e-6)


def test_seconds_come_back_and_reasons_where_there_are_none() -> None:
    wrong = ["MatMul(float32[16,8], float32[9,4])", "Nonsense(float32[2])", "not a kernel"]
    unknown = f"partc.{SUM_ROWS}(int64[30], float32[30,4], body='00000000')[2]"

    found = answers([RUNNABLE[0], *wrong, unknown, RUNNABLE[-1]])

    assert list(found) == [RUNNABLE[0], *wrong, unknown, RUNNABLE[-1]]
    for key in (RUNNABLE[0], RUNNABLE[-1]):
        assert found[key].seconds is not None
        assert 0 <= found[key].seconds < 1  # type: ignore[operator]
    assert all(found[key].seconds is None and found[key].unmeasured for key in (*wrong, unknown))
    assert "with this body" in found[unknown].unmeasured


def test_there_may_be_no_time() -> None:
    assert answers(RUNNABLE, seconds=0.0) == {}


FAKE = """
import json, os, signal, sys, time
print("ready", flush=True)
for line in sys.stdin:
    key = json.loads(line)["key"]
    if key == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if key == "leaves":
        sys.exit(3)
    if key == "hangs":
        time.sleep(600)
    print(json.dumps({"key": key, "seconds": 1.0}), flush=True)
"""


@pytest.fixture
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "COMMAND", (sys.executable, "-c", FAKE))


@pytest.mark.usefixtures("_fake")
def test_a_kernel_that_ends_the_process_is_left_out_and_the_others_go_on() -> None:
    found = answers(["a", "dies", "b", "leaves", "c"])

    assert [found[key].seconds for key in ("a", "b", "c")] == [1.0, 1.0, 1.0]
    assert found["dies"].unmeasured == "its process ended with signal 11"
    assert found["leaves"].unmeasured == "its process ended with exit code 3"


@pytest.mark.usefixtures("_fake")
def test_a_kernel_that_takes_too_long_ends_with_the_budget() -> None:
    begun_s = time.monotonic()

    found = answers(["a", "hangs", "b"], seconds=1.0)

    assert list(found) == ["a"]
    assert time.monotonic() - begun_s < 30


KILLED = f"""
import os, signal, time
from partc.compiler.kernel_times.list_kernels import StepKernels
from partc.compiler.kernel_times.measure_kernels import measure_kernels
keys = [{RUNNABLE[1]!r}] * 2
for answer in measure_kernels(keys, StepKernels((), {{}}, 17), {CPU!r}, time.monotonic() + 60):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_measurements_that_end_nor_of_killed_ones_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert subprocess.run([sys.executable, "-c", KILLED], check=False).returncode == -signal.SIGKILL

    assert answers(RUNNABLE[1:2])[RUNNABLE[1]].seconds is not None

    assert list(tmp_path.glob("partc-*")) == []


def test_a_process_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "COMMAND", (sys.executable, "-c", "raise SystemExit('no such thing')"))

    with pytest.raises(RankFailed, match="no such thing"):
        answers(["a"])


def test_what_has_no_gpu_has_no_times_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_ep_devices", lambda: [])

    assert source_here(("gpu", "p100", 1)) is None
    source = source_here(CPU)
    assert source is not None
    assert source.device == CPU
    assert source.versions.onnxruntime == ort.__version__


def test_a_function_that_is_not_known_cannot_run() -> None:
    with pytest.raises(CannotRun, match="no function"):
        KernelLibrary(17, {}, on_cpu=True).model(parse_kernel(RUNNABLE[-1]), 1)


def test_models_are_what_the_checker_accepts() -> None:
    for key in RUNNABLE:
        onnx.checker.check_model(KernelLibrary(17, FUNCTIONS, on_cpu=True).model(parse_kernel(key), 2))
