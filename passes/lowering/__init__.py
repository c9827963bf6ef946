"""From layouts to compute and communication nodes."""
