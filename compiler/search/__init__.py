"""Searches for a strategy: names, pipelines, walks, exhaustion, integer programs, placements."""
