"""Search among pipelines."""
