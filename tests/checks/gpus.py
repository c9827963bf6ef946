"""Whether this machine has a GPU that ONNX Runtime may use."""

from pathlib import Path

import onnxruntime as ort
import pytest

NEEDS_A_GPU = pytest.mark.skipif(
    "CUDAExecutionProvider" not in ort.get_available_providers() or not Path("/dev/nvidia0").exists(),
    reason="no GPU",
)
