"""A plan on a cluster, played: its time and its memory."""
