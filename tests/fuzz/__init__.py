"""Damaged files by the thousand: `make fuzz`."""
