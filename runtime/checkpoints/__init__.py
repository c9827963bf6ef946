"""A training on disk: written while it goes on, found again, and read on any number of ranks."""
