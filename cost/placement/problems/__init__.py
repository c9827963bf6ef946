"""Placement problems: read, as arrays, and the independent checker of answers."""
