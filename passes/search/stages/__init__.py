"""Stages: where a pipeline is cut, and layers on devices of their own."""
