"""Find out where to go on."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

import msgspec

from partc.runtime.checkpoints.manifest import MANIFEST_FILE, TrainingPosition, newest_checkpoint
from partc.runtime.checkpoints.stored_values import StoredValues
from partc.runtime.data.batches import samples_of_step
from partc.runtime.data.feeds import is_stream
from partc.runtime.data.sample_files import count_samples, is_of_samples
from partc.runtime.errors import BadCheckpoint, BadData, BadUsage
from partc.runtime.plan.program import Plan


@dataclass(frozen=True, slots=True)
class DataAsked:
    """What a training is to read: data as they are named, empty where batches are handed over.

    `is_shuffled`: the samples of files; None: as those before were. `file_samples`: how many those are.
    """

    name: str
    is_shuffled: bool | None = False
    file_samples: int | None = None


def data_asked(plan: Plan, name: str, is_shuffled: bool | None) -> DataAsked:
    """Return what a plan is to read, with how many samples files hold, where this host has them."""
    data_input = next((entry for entry in plan.data_inputs if entry.sample_axis is not None), None)
    if data_input is None or data_input.sample_axis is None or not is_of_samples(name):
        return DataAsked(name, is_shuffled)
    with suppress(BadData, BadUsage):  # who reads it tells what is wrong
        count = count_samples(Path(name), data_input.name, data_input.sample_axis)
        return DataAsked(name, is_shuffled, count)
    return DataAsked(name, is_shuffled)


def _new_training() -> str:
    return token_hex(8)


@dataclass(frozen=True, slots=True)
class StartPoint:
    """What was trained before: steps, batches of the data that this plan reads, and who has the variables.

    `workers`: of an asynchronous plan, the steps of each worker; `step` is their mean then, and `batches`
    those of the worker that is furthest. `samples`: in these batches; None: nobody has counted them.
    `training`: which training it is; one that begins is another than all before.
    """

    step: int = 0
    batches: int = 0
    samples: int | None = 0
    seed: int = 0
    checkpoint: Path | None = None
    workers: tuple[int, ...] = ()
    is_shuffled: bool = False
    training: str = field(default_factory=_new_training)

    @property
    def furthest(self) -> int:
        """The most steps that a worker has done."""
        return max(self.workers, default=self.step)


def begin_behind(trained: int, plan: Plan, data: str, seed: int) -> StartPoint:
    """Return where a training begins whose variables come of so many steps, with a batch each."""
    samples_of_batch = _samples_of_batch(plan, data) if trained else 0
    samples = None if samples_of_batch is None else trained * samples_of_batch
    return StartPoint(trained, trained, samples, seed, workers=(trained,) * len(plan.asynchronous))


def resume_from(
    plan: Plan, checkpoints: Path, seed: int | None, data: DataAsked, tell: Callable[[str], None]
) -> StartPoint:
    """Return the newest whole checkpoint's place; the beginning where there is no checkpoint.

    `plan`: with the sizes of the data that it is to read. `seed`: as asked for; None: the checkpoint's. A
    plan that takes more or fewer samples in a step goes on with the first whole batch that was not used. An
    asynchronous plan's total batch is that of all workers: each goes on where it was, if there are as many
    and their batches are as large; otherwise all begin alike. Raises BadCheckpoint, and BadUsage of another
    seed, or the same data in another order.
    """
    count = len(plan.asynchronous)
    newest, faults = newest_checkpoint(checkpoints)
    if newest is None:
        if faults:
            raise faults[0]
        tell(f"no checkpoint in {checkpoints}: training begins")
        return StartPoint(seed=seed or 0, workers=(0,) * count)
    stored = StoredValues(newest)
    stored.check(plan)
    position = stored.manifest.position
    for fault in faults:
        tell(f"{fault.what}, at {fault.at}: the checkpoint of step {position.step} is used")
    if seed not in (None, position.seed):
        raise BadUsage(
            f"seed {seed}, where training began with {position.seed}: random numbers would be others",
            at="--seed",
            fix=f"leave it out, or give {position.seed}",
        )
    _compare_data(position, data, tell)
    samples_of_batch = _samples_of_batch(plan, data.name)
    batches, samples = position.batches, position.samples
    if samples_of_batch is not None and samples is not None:
        batches = -(-samples // samples_of_batch)
        samples = batches * samples_of_batch
    elif is_stream(data.name):
        batches = _batches_of_stream(stored, plan)
        samples = samples if batches == position.batches else None  # that they hold
    is_alike = len(position.workers) == count and batches == position.batches
    workers = position.workers if is_alike else (position.step,) * count
    order = position.is_shuffled if data.is_shuffled is None else data.is_shuffled
    return StartPoint(
        position.step, batches, samples, position.seed, newest, workers, bool(order), position.training
    )


def _compare_data(position: TrainingPosition, data: DataAsked, tell: Callable[[str], None]) -> None:
    """Tell of other data. Raises BadUsage where some of their samples would come twice, and others never."""
    if not _is_same(data.name, position.data):
        now, before = (name or "batches that are handed over" for name in (data.name, position.data))
        tell(f"the data are {now}, where training began with {before}")
    elif None not in (position.is_shuffled, data.is_shuffled) and position.is_shuffled != data.is_shuffled:
        raise BadUsage(
            f"samples {'shuffled' if data.is_shuffled else 'in their own order'}, where training began with "
            f"them {'shuffled' if position.is_shuffled else 'in their own order'}: some would come twice",
            at="--shuffle",
            fix=f"{'give' if position.is_shuffled else 'leave out'} --shuffle as before",
        )
    elif None not in (position.file_samples, data.file_samples):
        _compare_counts(position, data, tell)


def _compare_counts(position: TrainingPosition, data: DataAsked, tell: Callable[[str], None]) -> None:
    """Tell of a file that has become longer or shorter. Raises BadUsage where that changes its order."""
    now, before = data.file_samples or 0, position.file_samples or 0
    if now == before:
        return
    what = f"{data.name} holds {now:,} samples, where training began with {before:,}"
    is_first_epoch = position.samples is not None and position.samples <= min(now, before)
    if is_first_epoch and not position.is_shuffled:
        tell(what)
        return
    raise BadUsage(
        f"{what}: in the order of that many some would come twice",
        at=data.name,
        fix="give it as it was, or under another name: that is taken for other data, and read on from there",
    )


def _is_same(one: str, other: str) -> bool:
    """Tell whether names are of the same data, files by where they are."""
    are_files = all(name and is_of_samples(name) for name in (one, other))
    return one == other or (are_files and Path(one).resolve() == Path(other).resolve())


def _samples_of_batch(plan: Plan, data: str) -> int | None:
    """Return how many samples a batch of the data has; None where only the data say it.

    What a plan assumes of a size that is left open binds what it takes of files, and no stream.
    """
    return samples_of_step(msgspec.structs.replace(plan, sizes={}) if is_stream(data) else plan)


def _batches_of_stream(stored: StoredValues, plan: Plan) -> int:
    """Return how many batches of a stream were used, of whatever size. Raises BadCheckpoint."""
    position, plan_sha256 = stored.manifest.position, stored.manifest.plan_sha256
    is_of_shards = plan.batch == "per-replica"
    is_told = position.shards is not None or not is_stream(position.data)
    if is_of_shards and not is_told and plan_sha256 != plan.sha256:
        raise BadCheckpoint(
            "a checkpoint of an earlier partc: it does not tell whether replicas read batches of their own",
            at=str(stored.folder / MANIFEST_FILE),
            fix="go on with the plan that wrote it, from whose next checkpoint any plan goes on",
        )
    if position.shards and is_of_shards:  # a shard's batch is as large among more or fewer
        return -(-position.batches * position.shards // plan.replicas)
    return position.batches
