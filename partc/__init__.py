"""partc: compile one training step on one device into the ONNX subgraphs of a whole cluster."""
