"""Processes of running jobs killed and stopped at random: `make chaos`."""
