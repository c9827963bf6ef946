"""This machine and this installation: its hardware, the clusters that an environment tells of, what works."""
