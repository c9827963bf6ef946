"""Hosts, devices and links: what a cluster is, and what its devices can do."""
