"""`partc.torch`: from a PyTorch module, loss and optimizer to one training step in ONNX.

import partc

partc.torch.export_step(
    module, lambda model, x, labels: F.cross_entropy(model(x), labels), optimizer, (x, labels), "train.onnx"
)

PyTorch 2.13 and onnxscript are needed to export, not to train.
"""

from partc.compiler.importing.torch_step.export_step import export_step

__all__ = ["export_step"]
