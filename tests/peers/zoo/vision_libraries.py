"""torchvision and timm, where `make test-peers-all` has put them: beside the other packages, on no path.

The index has torchvision built for CUDA only. Its models are plain Python: only the two operators that its import
wants to know are missing beside a PyTorch for CPUs, and no model of the zoo calls them, so that declaring them is enough.
Anywhere else on the path it would be imported, and fail, wherever transformers finds it.
"""

import sys
from pathlib import Path

import torch

FOLDER = Path(sys.prefix) / "vision"
IS_THERE = (FOLDER / "torchvision").exists() and (FOLDER / "timm").exists()

if IS_THERE and str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
    _operators = torch.library.Library("torchvision", "DEF")  # lives as long as it is referred to
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
