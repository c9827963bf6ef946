"""When every rank begins and ends each instruction of a predicted step: as a Recorder notes it in a run.

So one piece of code explains both a prediction and a run.
"""

import numpy as np

from partc.cost.cluster.cluster import Cluster
from partc.cost.network.ways import Array
from partc.cost.simulation.timeline import NOTHING_MEASURED, Measured, Play, Timeline
from partc.runtime.execution.recorder import StepTimes
from partc.runtime.plan.program import Instruction, Plan, Rank, Run, numbered_instructions_of


def time_instructions(
    plan: Plan, cluster: Cluster, measured: Measured = NOTHING_MEASURED
) -> tuple[Timeline, dict[int, StepTimes]]:
    """Return the predicted timeline of a step, and for every rank when it executes what, from 0 on."""
    play = _TimedPlay(plan, cluster, measured)
    play.execute_all()
    return play.timeline(), {rank.rank: play.times_of(rank) for rank in plan.ranks}


class _TimedPlay(Play):
    """Notes the ranks' clocks around each instruction, float64[ranks] by its number."""

    def __init__(self, plan: Plan, cluster: Cluster, measured: Measured) -> None:
        super().__init__(plan, cluster, measured)
        self._begins: dict[int, Array] = {}
        self._ends: dict[int, Array] = {}
        self._alone: dict[int, Array] = {}

    def execute(self, instruction: Instruction, number: int) -> None:
        """Play one instruction, and note when."""
        self._begins[number] = self.clock.copy()
        super().execute(instruction, number)
        self._ends[number] = self.clock.copy()
        is_run = isinstance(instruction, Run)
        self._alone[number] = self.alone.copy() if is_run else np.zeros(len(self.clock))

    def times_of(self, rank: Rank) -> StepTimes:
        """Return one rank's step: an entry per instruction of its program."""
        at = [number for number, _ in numbered_instructions_of(self.plan, rank)]
        begin_s, end_s, alone_s = (
            tuple(float(column[i][rank.rank]) for i in at)
            for column in (self._begins, self._ends, self._alone)
        )
        return StepTimes(1, begin_s, end_s, (0,) * len(at), alone_s)
