"""Which dimensions of every op may be split: the table of sharding rules."""
