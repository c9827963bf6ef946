"""TrainingGraph and what is done to it, one pass a file."""
