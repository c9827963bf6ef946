"""partc.torch without PyTorch. With it: tests/peers/test_torch_step.py."""

import sys

import pytest

import partc
from partc.runtime.errors import BadUsage


def test_a_missing_pytorch_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(BadUsage, match="fix: pip install torch"):
        partc.torch.export_step(None, lambda model, x: x, None, (), "train.onnx")
