"""Strategies that have a name, found by the sharding rules."""
