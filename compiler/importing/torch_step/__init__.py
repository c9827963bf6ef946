"""From a PyTorch module, loss and optimizer to one training step in ONNX (partc/torch.py)."""
