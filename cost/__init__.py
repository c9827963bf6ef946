"""Clusters, costs of ops and links, placement by integer programming."""
