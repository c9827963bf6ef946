"""The additive price of a step, and its least sum."""
