"""Training graphs that somebody else wrote, as TrainingGraph."""
