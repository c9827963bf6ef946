"""What a server owns: one memory that the environments of all sessions share."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from partc.runtime.data.initial import InitialValues
from partc.runtime.plan_folder import PlanFolder

Array = np.ndarray[Any, np.dtype[Any]]


class SharedValues(InitialValues):
    """Initial values that are made once: every later asker gets the same memory, as it is by then.

    An environment on a CPU keeps a variable where the initial value lies, so all of them see every update.
    """

    def __init__(self, folder: PlanFolder, given: Mapping[str, Array] | None = None) -> None:
        super().__init__(folder, given)
        self._shared: dict[tuple[str, int | None, int | None], Array] = {}

    def rows(self, name: str, start: int | None = None, stop: int | None = None) -> Array:
        """Return rows [start, stop) of variable `name`, whole if start is None: the memory itself."""
        key = (name, start, stop)
        if key not in self._shared:
            self._shared[key] = np.require(super().rows(name, start, stop), requirements=["C", "W"])
        return self._shared[key]
