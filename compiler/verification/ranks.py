"""The ranks of a plan, trained step by step, and what they hold after each step.

launch_in_process    all ranks in this process, in lockstep
launch_daemons       a daemon per rank, as `partc run` starts them; they stay in memory between steps
                     of an asynchronous plan: its processes train all steps at once, and leave the
                     variables after each in a file
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from partc.runtime.data.batches import Batch, share_of
from partc.runtime.data.checkpoint import map_array
from partc.runtime.data.feeds import open_source
from partc.runtime.execution.device import ExecutionDevice
from partc.runtime.execution.in_process import RanksInProcess, on_cpu
from partc.runtime.execution.row_hashes import row_hashes
from partc.runtime.interactive.stepper import Stepper
from partc.runtime.jobs.job import variables_file
from partc.runtime.jobs.job_folder import job_folder
from partc.runtime.jobs.results import Owner, assemble_output, copies_of, owners_of, pieces_among
from partc.runtime.jobs.runner import Runner, stage_data
from partc.runtime.plan.boxes import assemble, columns_of, find_rows, view, with_rows
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Plan, Rank

Array = np.ndarray[Any, np.dtype[Any]]
Data = str | Path | Sequence[Batch]


class Ranks(Protocol):
    """Ranks that train when they are told to."""

    def step(self) -> dict[str, Array]:
        """Train the next step; return the loss of the total batch by its name, nothing if there is none."""

    def read(self, name: str, rows: Array | None = None) -> Array:
        """Return a variable, whole, or its rows int64[k] in ascending order."""

    def row_hashes(self, name: str) -> Array:
        """Return uint64[rows] of a variable."""

    def disagreeing(self) -> tuple[str, ...]:
        """Return the variables whose copies are not bitwise equal."""


Launcher = Callable[[PlanFolder, Data, int, int], AbstractContextManager[Ranks]]  # (plan, data, steps, seed)


# ---------------------------------------------------------------- where pieces are put together


class _Pieces:
    """Variables put together from their owners."""

    def __init__(
        self,
        plan: Plan,
        read: Callable[[Owner, Array | None], Array],
        hashes: Callable[[Owner], Array],
    ) -> None:
        """`read`: what an owner holds, or some rows of it. `hashes`: of its rows, as far as it has them."""
        self._variables = {variable.name: variable for variable in plan.variables}
        self._owners = owners_of(plan)
        self._read = read
        self._hashes = hashes

    def read(self, name: str, rows: Array | None = None) -> Array:
        """Return a variable, whole, or its rows."""
        variable, pieces = self._variables[name], pieces_among(self._owners[name])
        dtype = np.dtype(variable.dtype)
        if rows is None:
            return assemble(variable.shape, dtype, ((p.piece.box, self._read(p, None)) for p in pieces))
        values = np.empty((len(rows), *variable.shape[1:]), dtype)
        for piece in pieces:
            places, own_rows = find_rows(piece.piece.box, rows)
            columns = with_rows(len(rows), columns_of(piece.piece.box))
            target = view(values, columns)
            target[places] = self._read(piece, own_rows).reshape(len(places), *target.shape[1:])
        return values

    def row_hashes(self, name: str) -> Array:
        """Return uint64[rows] of a variable."""
        shape = self._variables[name].shape
        hashes = np.zeros(shape[0] if shape else 1, np.uint64)
        for piece in pieces_among(self._owners[name]):
            places, own_rows = find_rows(piece.piece.box, np.arange(len(hashes)))
            hashes[places] += self._hashes(piece)[own_rows]
        return hashes

    def disagreeing(self) -> tuple[str, ...]:
        """Return the variables whose copies have other rows."""
        return tuple(
            name
            for name, owners in self._owners.items()
            if any(self._differ(copies) for copies in copies_of(owners))
        )

    def _differ(self, copies: Sequence[Owner]) -> bool:
        first, *others = copies
        if not others:
            return False
        hashes = self._hashes(first)
        return any(not np.array_equal(hashes, self._hashes(other)) for other in others)


# ---------------------------------------------------------------- in this process


@contextmanager
def launch_in_process(
    folder: PlanFolder,
    data: Data,
    steps: int,
    seed: int,
    device_of: Callable[[Rank], ExecutionDevice] = on_cpu,
) -> Iterator[Ranks]:
    """Open all ranks in this process."""
    yield _InProcess(folder, data, seed, device_of)


class _InProcess(_Pieces):
    def __init__(
        self, folder: PlanFolder, data: Data, seed: int, device_of: Callable[[Rank], ExecutionDevice]
    ) -> None:
        self._ranks = RanksInProcess(folder, seed=seed, device_of=device_of)
        super().__init__(
            folder.plan,
            lambda owner, rows: (piece := self._ranks.array_of(owner))[... if rows is None else rows],
            lambda owner: row_hashes(self._ranks.array_of(owner), columns_of(owner.piece.box)),
        )
        self._loss = folder.plan.loss
        self._share = _shares(folder.plan, data, seed)
        self._step = -1

    def step(self) -> dict[str, Array]:
        """Train the next step."""
        self._step += 1
        outputs = self._ranks.step_on(lambda rank: self._share(rank, self._step))
        return {name: value for name, value in outputs.items() if name == self._loss}


def _shares(plan: Plan, data: Data, seed: int) -> Callable[[Rank, int], Mapping[str, Array]]:
    """Return what ranks are fed, as they read it themselves."""
    if isinstance(data, str | Path):
        return open_source(str(data), plan, seed).share
    return lambda rank, step: share_of(plan, rank, data[step])


# ---------------------------------------------------------------- daemons


@contextmanager
def launch_daemons(folder: PlanFolder, data: Data, steps: int, seed: int) -> Iterator[Ranks]:
    """Start one daemon per rank, as `partc run` does; trained.safetensors is left alone."""
    with job_folder(folder.path) as temporary:
        if folder.plan.asynchronous:
            yield _Recorded(folder, data, steps, seed, temporary)
            return
        data_files, sizes = stage_data(folder.plan, data, steps, temporary)
        with Stepper(folder, data=data_files, stop_when_diverged=False, seed=seed, sizes=sizes) as stepper:
            yield _Daemons(stepper)


class _Daemons(_Pieces):
    def __init__(self, stepper: Stepper) -> None:
        super().__init__(stepper.plan, stepper.read, stepper.row_hashes)
        self._stepper = stepper
        self._outputs = [output for output in stepper.plan.outputs if output.name == stepper.plan.loss]

    def step(self) -> dict[str, Array]:
        """Train the next step."""
        # A list per fetch, since a list of names is fetched.
        fetched = cast(list[list[Array]], self._stepper.run([output.name for output in self._outputs]))
        return {
            output.name: assemble_output(output, values)
            for output, values in zip(self._outputs, fetched, strict=True)
        }


class _Recorded:
    """The one worker of an asynchronous plan, and its servers: what they left after each step."""

    def __init__(self, folder: PlanFolder, data: Data, steps: int, seed: int, folder_of_data: Path) -> None:
        self._result = Runner(folder).train(
            data,
            steps,
            seed=seed,
            stop_when_diverged=False,
            save=False,
            read_after=range(1, steps + 1),
            keep_in=folder_of_data,
        )
        self._kept = folder_of_data
        self._step = 0

    def step(self) -> dict[str, Array]:
        """Go on to the next step."""
        self._step += 1
        return self._result.outputs[self._step - 1]

    def read(self, name: str, rows: Array | None = None) -> Array:
        """Return a variable after the step, whole, or its rows."""
        array = map_array(variables_file(self._kept, self._step), name)
        return np.array(array if rows is None else array[rows])

    def row_hashes(self, name: str) -> Array:
        """Return uint64[rows] of a variable after the step."""
        return row_hashes(map_array(variables_file(self._kept, self._step), name))

    def disagreeing(self) -> tuple[str, ...]:
        """Return nothing: servers hold rows of their own."""
        return ()
