"""torchvision and timm, where `make test-peers-all` has put them: beside the other packages, on no path.

The index has torchvision built for CUDA only. Its models are plain Python: beside a PyTorch for CPUs only the
two operators are missing that its import wants to know. No model of the zoo calls them, so it is enough
to declare them. Anywhere else on the path transformers would find it, and fail to import it.
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
