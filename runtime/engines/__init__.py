"""Engines: what starts a job's ranks on the hosts of a cluster, and whether these have what a job needs."""
