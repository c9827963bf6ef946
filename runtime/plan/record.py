"""What all records of a plan, a strategy and their files are made of."""

import msgspec


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen fact that has a JSON form. Unknown keys are refused."""


Range = tuple[int, int]  # [start, stop)
