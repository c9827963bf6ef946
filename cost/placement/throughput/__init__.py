"""Placement that makes the busiest device's load least: steps follow each other."""
