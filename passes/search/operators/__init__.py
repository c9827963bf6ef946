"""Operator groups: what they are, how each may be configured, and what it then does."""
