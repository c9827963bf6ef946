"""The additive price of a step: what every operator takes alone, and what goes between any two.

    sum over k of own_s[k][c(k)]  +  sum over j < k of pair_s[j, k][c(j), c(k)]

OptCNN's model (Jia et al., ICML 2018; flexflow.txt, sections 2 and 8.2.3): nothing runs at the same time as
anything else. The sum is no step's time: operators on different workers do, and so do transfers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
ConfigNumbers = tuple[int, ...]  # by operator, the number of its configuration


@dataclass(frozen=True)
class AdditiveCosts:
    """Costs by the numbers of operators and of their configurations.

    names         of operators, as users know them
    own_s         float64[configurations] of each operator
    pair_s        (j, k), j < k -> float64[configurations of j, configurations of k]
    memory_bytes  float64[configurations, workers] of each: its variables
    limits_bytes  float64[workers]
    """

    names: Sequence[str]
    own_s: Sequence[Floats]
    pair_s: Mapping[tuple[int, int], Floats]
    memory_bytes: Sequence[Floats]
    limits_bytes: Floats

    def total_s(self, choice: ConfigNumbers) -> float:
        """Return the sum under a configuration of each operator."""
        own = sum(float(costs[config]) for costs, config in zip(self.own_s, choice, strict=True))
        return own + sum(float(costs[choice[j], choice[k]]) for (j, k), costs in self.pair_s.items())

    def fits(self, choice: ConfigNumbers) -> bool:
        """Tell whether every worker has room for the variables that it keeps."""
        memory_bytes = sum(
            (memory[config] for memory, config in zip(self.memory_bytes, choice, strict=True)), 0.0
        )
        return bool(np.all(memory_bytes <= self.limits_bytes))
