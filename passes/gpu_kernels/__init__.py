"""Rewritings of segments for ONNX Runtime's CUDA provider."""
