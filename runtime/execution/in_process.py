"""Train with all ranks in this process, in lockstep: for tests, and to verify without daemons.

By itself every rank computes on the CPU, so a plan for GPUs can be verified where there are none.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partc.runtime.data.batches import check_total_batch, share_of
from partc.runtime.data.initial import InitialValues
from partc.runtime.data.step_draws import draw_share
from partc.runtime.execution.device import ExecutionDevice, Sessions
from partc.runtime.execution.environment import Environment
from partc.runtime.execution.executor import Executor, diverged, is_finite, spoils_loss
from partc.runtime.execution.recorder import Recorder
from partc.runtime.execution.variable_watch import VariableWatch
from partc.runtime.jobs.results import (
    Owner,
    TrainingResult,
    assemble_outputs,
    copies_of,
    owners_of,
    pieces_among,
)
from partc.runtime.plan.boxes import assemble
from partc.runtime.plan.members import leaders_of
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.program import Rank, Start
from partc.runtime.transports.exchanged import Exchanged
from partc.runtime.transports.host_staging import transport_from
from partc.runtime.transports.in_memory import Board, InMemoryTransport

Array = np.ndarray[Any, np.dtype[Any]]


def train_in_process(
    plan_folder: PlanFolder | Path | str,
    batches: Iterable[Mapping[str, Array]],
    initial: Mapping[str, Array] | None = None,
    *,
    read_after: Collection[int] = (),
    stop_when_diverged: bool = True,
    seed: int = 0,
    first_step: int = 0,
) -> TrainingResult:
    """Train one step per total batch. `read_after`: steps (from 1) whose variables are kept as well.

    `seed` of what is drawn in the steps; `first_step`: how many steps were trained before.
    """
    ranks = RanksInProcess(plan_folder, initial, seed, first_step)
    outputs: list[dict[str, Array]] = []
    variables_after: dict[int, dict[str, Array]] = {}
    begun_s = time.perf_counter()
    for step, batch in enumerate(batches, 1):
        outputs.append(ranks.step(batch))
        if stop_when_diverged:
            ranks.check_loss(step)
            ranks.check_variables(step)
        if step in read_after:
            variables_after[step] = ranks.variables()
    took_s = time.perf_counter() - begun_s
    if stop_when_diverged:
        ranks.check_variables(len(outputs), is_last=True)
    return TrainingResult(
        variables=ranks.variables(),
        outputs=tuple(outputs),
        variables_after=variables_after,
        disagreeing=ranks.disagreeing(),
        payload_bytes=ranks.payload_bytes(),
        exchanged=ranks.exchanged(),
        steps_per_s=len(outputs) / took_s if outputs else 0.0,
        trained_s=took_s,
    )


def on_cpu(rank: Rank) -> ExecutionDevice:
    """Return a rank's threads of the CPU, whatever the plan binds it to."""
    return ExecutionDevice("cpu", 0, rank.threads)


class RanksInProcess:
    """Every rank of a plan in one process. `device_of`: where each computes."""

    def __init__(
        self,
        plan_folder: PlanFolder | Path | str,
        initial: Mapping[str, Array] | None = None,
        seed: int = 0,
        first_step: int = 0,
        traced_steps: int = 0,
        device_of: Callable[[Rank], ExecutionDevice] = on_cpu,
    ) -> None:
        folder = plan_folder if isinstance(plan_folder, PlanFolder) else read_plan_folder(plan_folder)
        self._plan = folder.plan
        self._owners = owners_of(folder.plan)
        self._seed = seed
        self._step = first_step
        sessions = Sessions(folder)
        first_values = InitialValues(folder, initial)
        board = Board()
        self._transports = {rank.rank: InMemoryTransport(board) for rank in self._plan.ranks}
        self.recorders = {
            rank.rank: Recorder(traced_steps, self._transports[rank.rank].traffic)
            for rank in self._plan.ranks
        }
        self._executors = {
            rank.rank: Executor(
                self._plan,
                rank,
                Environment(self._plan, rank, device_of(rank), first_values),
                sessions,
                transport_from(device_of(rank), self._transports[rank.rank]),
                self.recorders[rank.rank].watch if traced_steps else iter,
            )
            for rank in self._plan.ranks
        }

        self._watches = [
            VariableWatch(self._plan, rank, self._executors[rank.rank].environment)
            for rank in self._plan.ranks
        ]

    def step(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Train one step on a total batch; return the outputs of the total batch."""
        check_total_batch(self._plan, batch)
        return self.step_on(lambda rank: share_of(self._plan, rank, batch))

    def step_on(self, share: Callable[[Rank], Mapping[str, Array]]) -> dict[str, Array]:
        """Train one step, each rank on its share; return the outputs of the total batch."""
        drive_in_lockstep(
            {
                rank.rank: self._executors[rank.rank].step(self._feeds(rank, share(rank)))
                for rank in self._plan.ranks
            }
        )
        self._step += 1
        by_rank = {rank.rank: self._outputs(rank) for rank in leaders_of(self._plan)}
        return assemble_outputs(self._plan, by_rank)

    def variables(self) -> dict[str, Array]:
        """Return every variable, whole."""
        return {
            variable.name: assemble(
                variable.shape,
                np.dtype(variable.dtype),
                [
                    (owner.piece.box, self.array_of(owner))
                    for owner in pieces_among(self._owners[variable.name])
                ],
            )
            for variable in self._plan.variables
            if variable.name in self._owners
        }

    def disagreeing(self) -> tuple[str, ...]:
        """Return the variables whose copies are not bitwise equal."""
        return tuple(
            name
            for name, owners in self._owners.items()
            if any(self._differ(copies) for copies in copies_of(owners))
        )

    def payload_bytes(self) -> dict[int, dict[str, int]]:
        """Return the bytes of values that each rank sent so far: rank -> kind -> bytes."""
        return {rank: dict(transport.traffic.payload_bytes) for rank, transport in self._transports.items()}

    def exchanged(self) -> dict[int, Exchanged]:
        """Return what each rank sent and received so far."""
        return {rank: transport.traffic.exchanged for rank, transport in self._transports.items()}

    def check_loss(self, step: int) -> None:
        """Raise Diverged if a worker's loss is not finite, and name the one that spoilt it."""
        poor = [r for r in self._plan.ranks if not is_finite(self._plan, r, self._executors[r.rank])]
        if poor:
            rank = next((rank for rank in poor if spoils_loss(self._executors[rank.rank])), poor[0])
            raise diverged(self._plan, rank, self._executors[rank.rank], step)

    def check_variables(self, step: int, *, is_last: bool = False) -> None:
        """Raise Diverged if a parameter is not finite."""
        for watch in self._watches:
            watch.check(step, is_last=is_last)

    def _feeds(self, rank: Rank, share: Mapping[str, Array]) -> dict[str, Array]:
        return {**share, **draw_share(self._plan, rank, share, self._step, self._seed)}

    def array_of(self, owner: Owner) -> Array:
        """Return the memory of what a rank holds of a variable."""
        return self._executors[owner.rank].environment.array(owner.piece.value)

    def _differ(self, copies: Sequence[Owner]) -> bool:
        first, *others = (self.array_of(owner) for owner in copies)
        return any(not _same_bits(first, other) for other in others)

    def _outputs(self, rank: Rank) -> dict[str, Array]:
        environment = self._executors[rank.rank].environment
        return {output.name: environment.array(output.value).copy() for output in self._plan.outputs}


def drive_in_lockstep(steps: Mapping[int, Iterator[Start]]) -> None:
    """Advance every rank in turn until all have finished their step, or one raises; a note says which."""
    waiting: dict[int, Start | None] = dict.fromkeys(steps)
    while waiting:
        before = dict(waiting)
        for rank in before:
            try:
                communication = next(steps[rank], None)
            except Exception as error:
                error.add_note(f"raised by rank {rank} of {len(steps)}")
                raise
            if communication is None:
                del waiting[rank]
            else:
                waiting[rank] = communication
        if waiting == before:
            stuck = {
                rank: start.label or start.tag_id for rank, start in waiting.items() if start is not None
            }
            raise AssertionError(f"deadlock: rank -> the communication it waits for: {stuck}")


def _same_bits(one: Array, other: Array) -> bool:
    return one is other or one.tobytes() == other.tobytes()
