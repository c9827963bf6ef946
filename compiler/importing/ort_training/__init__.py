"""What onnxruntime-training 1.19 writes: a training model, an optimizer model, a checkpoint."""
