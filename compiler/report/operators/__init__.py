"""The report's drawing of the user's graph: where every node and variable is, and what was considered."""
