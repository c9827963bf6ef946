"""Model files: read, written, checked, cut."""
