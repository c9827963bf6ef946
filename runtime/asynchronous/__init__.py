"""Asynchronous training: every worker has a session of its own with servers that all share."""
