"""Builders of forward ONNX graphs."""
