"""Placement that makes the makespan of one step least."""
