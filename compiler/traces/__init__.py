"""Timelines as files that a trace viewer opens: what the simulator predicts, what a run measured."""
