"""Where a device's arrays lie: a CPU's in host memory by NumPy, a GPU's in its own by CuPy.

CuPy's arrays have NumPy's interface: what only reads, cuts and fills them need not know which they are.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort

# A tensor of a plan has whatever element type the model has.
Array = np.ndarray[Any, np.dtype[Any]]


class DeviceArrays(Protocol):
    """Makes and copies arrays of one device."""

    def empty(self, shape: tuple[int, ...] | int, dtype: np.dtype[Any]) -> Array:
        """Return an array of any content."""

    def zeros(self, shape: tuple[int, ...] | int, dtype: np.dtype[Any]) -> Array:
        """Return an array of zeros."""

    def contiguous(self, array: Array) -> Array:
        """Return an array of this device in C order: itself, or a copy."""

    def placed(self, array: Array) -> Array:
        """Return an array on the device in C order: itself where it lies there, else a copy."""

    def in_host_memory(self, array: Array) -> Array:
        """Return an array of this device in host memory: itself where it lies there, else a copy."""

    def copy(self, target: Array, source: Array) -> None:
        """Copy an array, wherever it lies, into one of this device of the same shape."""

    def tensor(self, array: Array) -> ort.OrtValue:
        """Return ONNX Runtime's view of an array of this device in C order."""

    def view(self, tensor: ort.OrtValue) -> Array:
        """Return a tensor that lies on the device as an array."""

    def address(self, array: Array) -> int:
        """Return where an array's memory begins."""

    def wait(self) -> None:
        """Wait for what the device does with arrays: ONNX Runtime's streams do not."""


class HostArrays:
    """NumPy's."""

    def empty(self, shape: tuple[int, ...] | int, dtype: np.dtype[Any]) -> Array:
        """Return an array of any content."""
        return np.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...] | int, dtype: np.dtype[Any]) -> Array:
        """Return an array of zeros."""
        return np.zeros(shape, dtype)

    def contiguous(self, array: Array) -> Array:
        """Return an array in C order."""
        return np.asarray(array, order="C")

    def placed(self, array: Array) -> Array:
        """Return an array in C order."""
        return np.asarray(array, order="C")

    def in_host_memory(self, array: Array) -> Array:
        """Return the array."""
        return array

    def copy(self, target: Array, source: Array) -> None:
        """Copy an array."""
        target[...] = source

    def tensor(self, array: Array) -> ort.OrtValue:
        """Return ONNX Runtime's view of an array."""
        return ort.OrtValue.ortvalue_from_numpy(array)

    def view(self, tensor: ort.OrtValue) -> Array:
        """Return a tensor's memory."""
        array: Array = tensor.numpy()
        return array

    def address(self, array: Array) -> int:
        """Return where an array's memory begins."""
        return int(array.ctypes.data)

    def wait(self) -> None:
        """Do nothing: what is done is complete."""


class GpuArrays:
    """CuPy's, of the GPU of a number. What it does with arrays is done in order, and later than asked."""

    def __init__(self, index: int) -> None:
        import cupy

        self._cupy = cupy
        self._index = index
        cupy.cuda.Device(index).use()

    def empty(self, shape: tuple[int, ...] | int, dtype: np.dtype[Any]) -> Array:
        """Return an array of any content."""
        array: Array = self._cupy.empty(shape, dtype)
        return array

    def zeros(self, shape: tuple[int, ...] | int, dtype: np.dtype[Any]) -> Array:
        """Return an array of zeros."""
        array: Array = self._cupy.zeros(shape, dtype)
        return array

    def contiguous(self, array: Array) -> Array:
        """Return an array of the device in C order."""
        in_order: Array = self._cupy.ascontiguousarray(array)
        return in_order.reshape(array.shape)  # CuPy makes one axis of none

    def placed(self, array: Array) -> Array:
        """Return an array on the device in C order."""
        array = array if isinstance(array, self._cupy.ndarray) else self._cupy.asarray(array)
        return self.contiguous(array)

    def in_host_memory(self, array: Array) -> Array:
        """Return a copy in host memory."""
        host: Array = self._cupy.asnumpy(array)
        return host

    def copy(self, target: Array, source: Array) -> None:
        """Copy an array, wherever it lies."""
        if isinstance(source, np.ndarray) or not (target.flags.c_contiguous and source.flags.c_contiguous):
            target[...] = self._cupy.asarray(source)
            return
        runtime, stream = self._cupy.cuda.runtime, self._cupy.cuda.get_current_stream()
        here, there = self.address(target), self.address(source)
        runtime.memcpyAsync(here, there, target.nbytes, runtime.memcpyDeviceToDevice, stream.ptr)

    def tensor(self, array: Array) -> ort.OrtValue:
        """Return ONNX Runtime's view of an array of the device."""
        return ort.OrtValue.from_dlpack(_Bools(array) if array.dtype == np.bool_ else array)

    def view(self, tensor: ort.OrtValue) -> Array:
        """Return a tensor that lies on the device as an array, another one's as a copy."""
        if tensor.device_name() == "cpu":
            return self.placed(tensor.numpy())
        array: Array = self._cupy.from_dlpack(tensor)
        return array.view(np.bool_) if tensor.data_type() == "tensor(bool)" else array

    def address(self, array: Array) -> int:
        """Return where an array's memory begins."""
        memory: Any = array.data
        return int(memory.ptr)

    def wait(self) -> None:
        """Wait for what the device does with arrays."""
        self._cupy.cuda.get_current_stream().synchronize()


@dataclass(frozen=True, slots=True)
class _Bools:
    """An array of bools as ONNX Runtime 1.31 takes them: it knows no bools of DLPack's, but this name."""

    array: Array

    @property
    def dtype(self) -> np.dtype[np.bool_]:
        return np.dtype(np.bool_)

    def __dlpack__(self, **options: object) -> object:
        return self.array.view(np.uint8).__dlpack__(**options)  # type: ignore[arg-type]


HOST_ARRAYS = HostArrays()


@cache
def gpu_arrays(index: int) -> GpuArrays:
    """Return the arrays of a GPU. Raises ImportError without CuPy."""
    return GpuArrays(index)
