"""Micro-batches: what of a step runs once for each of them, and in which order."""
