"""Data of which every replica reads a part of its own: no two replicas see the same batch.

    batches      shard i of n: elements i, i + n, i + 2 n, ... as tf.data's Dataset.shard takes them
    a function   of (num_shards, shard_id): whatever it returns for them, as a reader of files would

A batch is what one replica is fed in a step: input name -> array.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from partc.runtime.callers_code import CallersBatches, callers_code
from partc.runtime.data.batches import Batch, check_share, copied, inputs_of, join_shares, unmasked
from partc.runtime.data.not_finite import Index, element
from partc.runtime.errors import BadData
from partc.runtime.plan.program import Plan, Rank
from partc.runtime.plan.variables import DataInput

Array = np.ndarray[Any, np.dtype[Any]]
ReadShard = Callable[[int, int], Iterable[Batch]]  # (num_shards, shard_id)

PARAMETERS = ("num_shards", "shard_id")


class ShardedData:
    """A data set that replicas share out among themselves.

    With `name`, MODULE:FUNC, every rank reads its own shard; otherwise whoever has this object reads all.
    """

    def __init__(self, data: Iterable[Batch] | ReadShard, name: str | None = None) -> None:
        self.name = name
        self._data = data

    def shard(self, num_shards: int, shard_id: int) -> Iterator[Batch]:
        """Return one shard's batches."""
        if callable(self._data):
            with callers_code():
                batches = self._data(num_shards, shard_id)
            return CallersBatches(batches)
        return islice(CallersBatches(self._data), shard_id, None, num_shards)

    def streams(self, num_shards: int) -> list[Iterator[Batch]]:
        """Return all shards' batches, copied, to be read in turn: shard 0, shard 1, ..., shard 0, ..."""
        if callable(self._data):
            return [map(_copied, self.shard(num_shards, shard_id)) for shard_id in range(num_shards)]
        return [map(_copied, CallersBatches(self._data))] * num_shards

    @property
    def is_read_once(self) -> bool:
        """Whether batches that were read are gone."""
        return isinstance(self._data, Iterator)

    def __iter__(self) -> Iterator[Batch]:
        """Yield all batches, as one device reads them."""
        return self.shard(1, 0)


class BatchStream:
    """Total batches for several trainings, each of which reads on from its place in the data.

    What one that failed has read in vain is read again, if the data can be.
    """

    def __init__(self, data: ShardedData, plan: Plan) -> None:
        self._data = data
        self._plan = plan
        self._begin()

    def behind(self, batches: int) -> Iterator[dict[str, Array]]:
        """Yield what comes behind so many batches. Raises BadData where that was read, and is gone."""
        if batches < self._read:
            if self._data.is_read_once:
                raise BadData(
                    f"{self._read} batches were read, of which {batches} are trained: the others are gone",
                    at="data",
                    fix="shard data that can be read again: a list, or a function of (num_shards, shard_id)",
                )
            self._begin()
        while (shares := next(self._rows, None)) is not None:
            self._read += 1
            if self._read > batches:
                yield join_shares(self._plan, shares)

    def __iter__(self) -> Iterator[dict[str, Array]]:
        """Yield all batches."""
        return self.behind(0)

    def _begin(self) -> None:
        self._rows = zip(*self._data.streams(self._plan.replicas), strict=False)
        self._read = 0


def _copied(batch: Batch) -> Batch:
    return copied(batch) if isinstance(batch, Mapping) else batch  # whoever reads it tells what is wrong


def is_read_by_shard(function: Callable[..., object]) -> bool:
    """Tell whether a function says what it returns for one shard of several."""
    try:
        return tuple(inspect.signature(function).parameters)[:2] == PARAMETERS
    except (TypeError, ValueError):  # builtins have no signature
        return False


class ShardedSource:
    """One replica's batches at a time, from a user's function of (num_shards, shard_id).

    Inputs without a sample axis are the same for all replicas: shard 0's. Shards begin with the batch of step
    `first`.
    """

    def __init__(self, plan: Plan, read: ReadShard, name: str, first: int = 0) -> None:
        self._plan = plan
        self._name = name
        self._shards = [_Shard(read, plan.replicas, shard, name, first) for shard in range(plan.replicas)]
        self._has_shared = any(entry.sample_axis is None for entry in plan.data_inputs)

    def total(self, step: int) -> dict[str, Array]:
        """Return the batch of all replicas. Steps must come in order."""
        return join_shares(self._plan, [self._share_of(shard, step) for shard in range(self._plan.replicas)])

    def share(self, rank: Rank, step: int) -> dict[str, Array]:
        """Return what one rank is fed, reading no other shard than its own, and shard 0."""
        fed = inputs_of(self._plan, rank)
        if not fed:
            return {}
        share = self._share_of(rank.replica or 0, step)
        if self._has_shared and rank.replica:
            first = self._share_of(0, step)
            share = {e.name: (first if e.sample_axis is None else share)[e.name] for e in fed}
        return {entry.name: share[entry.name] for entry in fed}

    def place(self, rank: Rank | None, step: int, data_input: DataInput, index: Index) -> str:
        """Say which element of a shard's batch it is; of no rank: of all shards' batches, joined."""
        whose = "all shards" if rank is None else f"shard {rank.replica or 0}"
        return f"{self._name}, {whose}, batch of step {step + 1}: {element(data_input.name, index)}"

    def _share_of(self, shard: int, step: int) -> dict[str, Array]:
        share = self._shards[shard].batch(step)
        check_share(self._plan, share, shard, at=f"{self._name}, shard {shard}")
        return share


class _Shard:
    """The batches of one shard, in their order, copied; not opened before the first is wanted."""

    def __init__(self, read: ReadShard, num_shards: int, shard_id: int, name: str, first: int) -> None:
        self._read = partial(read, num_shards, shard_id)
        self._at = f"{name}, shard {shard_id} of {num_shards}"
        self._batches: Iterator[Batch] | None = None
        self._step = first - 1
        self._batch: dict[str, Array] = {}

    def batch(self, step: int) -> dict[str, Array]:
        if self._batches is None:
            self._batches = iter(self._read())
        while self._step < step:
            batch = next(self._batches, None)
            self._step += 1
            if not isinstance(batch, Mapping):
                what = (
                    f"ends after {self._step} batches" if batch is None else f"gives {type(batch).__name__}"
                )
                fix = "let it go on, or train fewer steps" if batch is None else "yield dicts: input -> array"
                raise BadData(f"the data {what}", at=self._at, fix=fix)
            self._batch = {
                name: np.array(unmasked(array, f"{self._at}, step {self._step + 1}, data input {name!r}"))
                for name, array in batch.items()
            }
        return self._batch
