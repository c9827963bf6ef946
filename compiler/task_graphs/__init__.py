"""The task graph of operator groups: what a search prices instead of whole plans."""
