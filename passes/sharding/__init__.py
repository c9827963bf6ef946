"""Which dimensions of every op may be split, and the layouts that follow."""
