"""Training step by step: one process asks, every rank's daemon obeys."""
