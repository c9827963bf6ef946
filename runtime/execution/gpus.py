"""This machine's GPUs, as ONNX Runtime and CuPy find them."""

import contextlib
import ctypes
import os
from functools import cache
from pathlib import Path

import onnxruntime as ort

from partc.runtime.log import log


@cache
def load_cuda() -> str:
    """Load the libraries of ONNX Runtime's CUDA provider; return what is wrong, empty if nothing is.

    Those that pip has installed beside it are found whatever LD_LIBRARY_PATH says.
    """
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        ort.preload_dlls()  # prints what it does not find, which the loader may find elsewhere
    libraries = Path(ort.__file__).parent / "capi"
    try:
        for name in ("shared", "cuda"):
            ctypes.CDLL(str(libraries / f"libonnxruntime_providers_{name}.so"), ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error)
    return ""


def count_gpus() -> int:
    """Return how many GPUs CUDA lets this process use. Raises ImportError without CuPy."""
    import cupy

    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:  # there is none, or no driver
        return 0


def has_nccl() -> bool:
    """Tell whether NCCL's Python bindings load; the log says why not."""
    try:
        import nccl.core  # noqa: F401
    except ImportError as error:
        log.info("GPUs communicate through host memory: %s; pip install 'partc[gpu]' brings NCCL", error)
        return False
    return True
