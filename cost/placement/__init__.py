"""Placement of a graph's nodes on accelerators and a CPU: answers, and bounds that can be checked."""
