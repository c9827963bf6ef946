"""Have kernels timed in a process of their own, which may crash and use memory as it likes.

    this process     keys, one at a time  ──>  time_kernels.py  ──>  seconds, or why there are none

A kernel whose process dies is not asked for again; another process goes on with the next one.
"""

import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import msgspec
import onnx
from onnx import helper

from partc.compiler.kernel_times.list_kernels import StepKernels
from partc.compiler.kernel_times.measure_segments import cpu_name
from partc.compiler.kernel_times.read_times import versions_here
from partc.compiler.kernel_times.time_kernels import READY, Answer, KernelRequest, Setting
from partc.cost.simulation.measured_kernels import DeviceKind, MeasuredDevice
from partc.runtime.engines.host_check import gpu_lacks
from partc.runtime.errors import RankFailed
from partc.runtime.jobs.job_folder import held_folder

COMMAND = (sys.executable, "-P", "-m", "partc.compiler.kernel_times.time_kernels")
START_S = 120.0  # a process that has not begun by then does not
END_S = 5.0
FOLDERS = "partc-kernels-"


def source_here(device: DeviceKind) -> MeasuredDevice | None:
    """Return what times of a kind of device would be of on this machine; None where it has no such device."""
    kind, profile, threads = device
    if kind == "cpu":
        return MeasuredDevice("cpu", profile, threads, cpu_name(), versions_here())
    if any(gpu_lacks("gpu", 0)):
        return None
    return MeasuredDevice("gpu", profile, threads, _gpu_name(), versions_here())


def _gpu_name() -> str:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=False, timeout=END_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        listing = ""
    return (listing.splitlines() or ["GPU"])[0]


def measure_kernels(
    keys: Sequence[str], step: StepKernels, device: DeviceKind, until_s: float
) -> Iterator[Answer]:
    """Yield what comes of each kernel, as far as there is time until `until_s` on the monotonic clock.

    Raises RankFailed where no process can be started.
    """
    with held_folder(Path(tempfile.gettempdir()), FOLDERS) as folder:
        path = folder / "functions.onnx"
        _write_functions(step, path)
        setting = Setting(device[0], 0, device[2], str(path))
        waiting = list(keys)
        while waiting and time.monotonic() < until_s:
            with _process(setting) as process:
                for answer in _answers(process, waiting, until_s):
                    waiting.remove(answer.key)
                    yield answer


def _write_functions(step: StepKernels, path: Path) -> None:
    graph = helper.make_graph([], "functions", [], [])
    opsets = [helper.make_opsetid("", step.opset)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, functions=list(step.functions.values())), path)


def _answers(process: "subprocess.Popen[bytes]", waiting: Sequence[str], until_s: float) -> Iterator[Answer]:
    """Yield answers until the process dies, which is one too, or there is no time."""
    assert process.stdin is not None and process.stdout is not None
    for key in tuple(waiting):
        try:
            process.stdin.write(msgspec.json.encode(KernelRequest(key)) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return  # it died between two kernels: the next process takes this one
        line = _line(process.stdout, until_s)
        if line is None:
            return
        if not line:
            yield Answer(key, unmeasured=f"its process ended with {_end_of(process)}")
            return
        yield msgspec.json.decode(line, type=Answer)


def _line(output: IO[bytes], until_s: float) -> bytes | None:
    """Return the next line, nothing where the output ended, None where there is no time left."""
    ready, _, _ = select.select([output], [], [], max(0.0, until_s - time.monotonic()))
    return output.readline() if ready else None


def _end_of(process: "subprocess.Popen[bytes]") -> str:
    code = process.wait()
    return f"signal {-code}" if code < 0 else f"exit code {code}"


@contextmanager
def _process(setting: Setting) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process that times kernels, and end it. It is none of the terminal's: Ctrl-C is not for it."""
    with TemporaryFile() as errors:
        process = subprocess.Popen(
            [*COMMAND, msgspec.json.encode(setting).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            if _line(process.stdout, time.monotonic() + START_S) != f"{READY}\n".encode():
                process.kill()
                process.wait()
                errors.seek(0)
                error_lines = errors.read().decode(errors="replace").strip().splitlines()
                why = error_lines[-1] if error_lines else "it says nothing"
                raise RankFailed(
                    f"the process that times kernels does not start: {why}",
                    at=" ".join(COMMAND),
                    fix="run the command that it is, and mend what it says",
                )
            yield process
        finally:
            process.kill()
            process.wait()
