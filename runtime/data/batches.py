"""A total batch of all replicas, and each rank's share of it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from partc.runtime.data.column import Column
from partc.runtime.data.not_finite import Index, element
from partc.runtime.errors import BadData, BadUsage
from partc.runtime.plan.boxes import part_range
from partc.runtime.plan.program import IDLE, Plan, Rank
from partc.runtime.plan.variables import DataInput

Array = np.ndarray[Any, np.dtype[Any]]
Fed = Array | np.generic  # a scalar of NumPy's is as good as an array of no axes
Batch = Mapping[str, Fed]


def total_shape(plan: Plan, data_input: DataInput) -> tuple[int | str, ...]:
    """Return the shape of an input's total batch, symbolic sizes as the plan assumes them."""
    shape = [plan.sizes.get(size, size) if isinstance(size, str) else size for size in data_input.shape]
    axis = data_input.sample_axis
    if axis is not None and plan.batch == "per-replica" and isinstance(size := shape[axis], int):
        shape[axis] = size * plan.replicas
    return tuple(shape)


def samples_of_step(plan: Plan) -> int | None:
    """Return how many samples a step takes; None where no input says it."""
    for data_input in plan.data_inputs:
        if data_input.sample_axis is not None:
            size = total_shape(plan, data_input)[data_input.sample_axis]
            return size if isinstance(size, int) else None
    return None


def samples_fed(plan: Plan, rank: Rank, share: Mapping[str, Array]) -> int | None:
    """Return how many samples all replicas take in a step, by one rank's share; None where that has none.

    What the plan assumes is not asked: a stream's batches are of the size that they have.
    """
    if (fixed := samples_of_step(msgspec.structs.replace(plan, sizes={}))) is not None:
        return fixed
    for data_input in plan.data_inputs if rank.replica is not None else ():
        if data_input.sample_axis is not None and data_input.name in share:
            return int(share[data_input.name].shape[data_input.sample_axis]) * plan.replicas
    return None


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raise BadUsage where a value for a symbolic size is none."""
    if wrong := sorted(name for name, size in sizes.items() if size < 1):
        raise BadUsage(f"{wrong[0]} = {sizes[wrong[0]]} is no size", at="sizes", fix="give at least 1")


def symbolic_sizes(data_inputs: Iterable[DataInput]) -> set[str]:
    """Return the sizes of what is fed that the model leaves open."""
    return {size for entry in data_inputs for size in entry.shape if isinstance(size, str)}


def fixed_sizes(plan: Plan) -> dict[str, int]:
    """Return the symbolic sizes of the model that the plan is made for, and for no others."""
    left_open = symbolic_sizes(plan.data_inputs)
    return {name: size for name, size in plan.sizes.items() if name not in left_open}


def sizes_of(plan: Plan, batch: Batch) -> dict[str, int]:
    """Return the symbolic sizes that a checked total batch shows."""
    sizes: dict[str, int] = {}
    for data_input in plan.data_inputs:
        for axis, size in enumerate(data_input.shape):
            if isinstance(size, str):
                is_total = axis == data_input.sample_axis and plan.batch == "per-replica"
                sizes[size] = batch[data_input.name].shape[axis] // (plan.replicas if is_total else 1)
    return sizes


def refuse_other_sizes(given: Mapping[str, int], shown: Mapping[str, int]) -> None:
    """Raise BadUsage where batches show another symbolic size than is given for it."""
    for name in sorted(given.keys() & shown.keys()):
        if given[name] != shown[name]:
            raise BadUsage(
                f"size {name!r} of {given[name]}, where the batches show {shown[name]}",
                at="sizes",
                fix="leave sizes out: batches that are handed over show their own",
            )


def place_in_batch(
    name: str, plan: Plan, rank: Rank | None, step: int, data_input: DataInput, index: Index
) -> str:
    """Say which element of a step's batch it is."""
    in_total = index_in_total(plan, rank, data_input, index)
    return f"{name}, batch of step {step + 1}: {element(data_input.name, in_total)}"


def check_total_batch(plan: Plan, batch: Batch, place: str = "") -> None:
    """Check the names, types, shapes and values of a total batch. Raises BadData.

    `place`: where the batch comes from, as messages say it.
    """
    if not isinstance(batch, Mapping):
        fix = "supply a mapping of input name -> array for every step"
        raise BadData(f"a batch is a {type(batch).__name__}", at=place or "data", fix=fix)
    known = {data_input.name: data_input for data_input in plan.data_inputs}
    if missing := sorted(known.keys() - batch.keys()):
        raise BadData(
            f"no data for input {missing[0]!r}",
            at="data",
            fix=f"supply every one of {sorted(known)}",
        )
    if stray := sorted(batch.keys() - known.keys() - set(plan.unread_inputs)):
        raise BadData(
            f"data for {stray[0]!r}, which is no input of the model",
            at="data",
            fix=f"supply {sorted(known)} and nothing else",
        )
    for name, data_input in known.items():
        check_input(plan, data_input, batch[name], place)
        check_values_taken(data_input, np.asarray(batch[name]), None, place)
    _check_same_sizes(plan, batch, place)


def _check_same_sizes(plan: Plan, batch: Batch, place: str) -> None:
    """Refuse a batch in which one symbolic size has two values. Raises BadData."""
    firsts: dict[tuple[str, bool], tuple[int, str]] = {}
    for data_input in plan.data_inputs:
        for axis, size in enumerate(data_input.shape):
            if isinstance(size, str):
                this = batch[data_input.name].shape[axis], data_input.name
                first = firsts.setdefault((size, axis == data_input.sample_axis), this)
                if first[0] != this[0]:
                    raise BadData(
                        f"size {size!r} is {first[0]} in {first[1]!r} and {this[0]} in {this[1]!r}",
                        at=f"{place}data input {data_input.name!r}, axis {axis}",
                        fix="supply samples of one size, as many of one input as of the other",
                    )


def check_values_taken(
    data_input: DataInput, array: Array, batch: int | None = None, place: str = ""
) -> None:
    """Refuse integers that the graph would index something with, and that lie outside of it. Raises BadData.

    `batch`: how many samples a step takes, where `array` holds those of all steps.
    """
    taken = data_input.taken
    if taken is None or array.dtype.kind not in "iu" or not array.size:
        return
    if array.min() >= taken.low and array.max() < taken.high:
        return
    wrong = (array < taken.low) | (array >= taken.high)
    for ignored in taken.ignored:
        wrong &= array != ignored
    if not wrong.any():
        return
    index = np.unravel_index(int(np.argmax(wrong)), array.shape)
    axis = data_input.sample_axis
    sample = None if axis is None else int(index[axis])
    step = "" if batch is None or sample is None else f", step {sample // batch + 1}"
    but = "" if not taken.ignored else f" or {', '.join(map(str, taken.ignored))}"
    raise BadData(
        f"value {array[index]}, where the model takes {taken.low} to {taken.high - 1}{but}",
        at=f"{place}data input {data_input.name!r}{step}" + ("" if sample is None else f", sample {sample}"),
        fix="correct the data; of labels that are not to count, tell `partc grad` with --ignore-index",
    )


def unmasked(array: Any, at: str) -> Any:  # whatever is given as an array
    """Return what is given. Raises BadData where elements of it are masked: a step would read them all."""
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise BadData(
            f"{np.count_nonzero(array.mask)} of {array.size} elements are masked, and a step knows no masks",
            at=at,
            fix="fill them, as array.filled(0) does; of labels that are not to count, fill in what "
            "`partc grad` was told with --ignore-index",
        )
    return array


def check_input(plan: Plan, data_input: DataInput, array: Fed, place: str = "") -> None:
    """Check one input's total batch. Raises BadData."""
    unmasked(array, f"{place}data input {data_input.name!r}")
    if not isinstance(array, np.ndarray | np.generic):
        raise BadData(
            f"the data is a {type(array).__name__}, the model reads {data_input.dtype}",
            at=f"{place}data input {data_input.name!r}",
            fix=f"make an array of it: numpy.asarray(data, '{data_input.dtype}')",
        )
    refuse_empty(data_input, array, place)
    expected = total_shape(plan, data_input)
    if array.dtype != np.dtype(data_input.dtype):
        raise BadData(
            f"the data is {array.dtype}, the model reads {data_input.dtype}",
            at=f"{place}data input {data_input.name!r}",
            fix=f"convert it: array.astype('{data_input.dtype}')",
        )
    fits = array.ndim == len(expected) and all(
        not isinstance(declared, int) or actual == size
        for actual, size, declared in zip(array.shape, expected, data_input.shape, strict=True)
    )
    if not fits:
        raise BadData(
            f"a batch has shape {list(array.shape)}, the model reads {list(expected)}",
            at=f"{place}data input {data_input.name!r}",
            fix=f"supply the samples of all {plan.replicas} replicas together, shaped {list(expected)}"
            + "".join(f", or compile with another --size {name}" for name in fixed_sizes(plan)),
        )
    axis = data_input.sample_axis
    if axis is not None and isinstance(data_input.shape[axis], str) and array.shape[axis] % plan.replicas:
        raise BadData(
            f"{array.shape[axis]} samples do not divide among {plan.replicas} replicas",
            at=f"{place}data input {data_input.name!r}, axis {axis}",
            fix=f"use a batch that is a multiple of {plan.replicas}, or give the model a batch of that size",
        )
    if axis is not None:
        _check_microbatches(plan, data_input, array.shape[axis] // plan.replicas, place)


def _check_microbatches(plan: Plan, data_input: DataInput, samples: int, place: str) -> None:
    """Refuse samples of which the plan does not know how many there are, and that do not divide."""
    is_told = data_input.sample_axis is not None and isinstance(data_input.shape[data_input.sample_axis], int)
    if not is_told and samples % plan.microbatches:
        raise BadData(
            f"a replica's {samples} samples do not divide into {plan.microbatches} micro-batches",
            at=f"{place}data input {data_input.name!r}, axis {data_input.sample_axis}",
            fix=f"use a batch that is a multiple of {plan.replicas * plan.microbatches}",
        )


def refuse_empty(data_input: DataInput, array: Fed | Column, place: str = "") -> None:
    """Refuse data without samples: a mean over none is no number. Raises BadData."""
    axis = data_input.sample_axis
    if axis is not None and axis < array.ndim and not array.shape[axis]:
        raise BadData(
            f"the batch is empty: no samples on axis {axis} of {array.dtype}{list(array.shape)}",
            at=f"{place}data input {data_input.name!r}",
            fix="supply at least one sample for every replica, and leave out batches that are empty",
        )


def check_share(plan: Plan, share: Mapping[str, Array], replica: int, at: str) -> None:
    """Check what one replica is fed in a step. Raises BadData."""
    known = {data_input.name: data_input for data_input in plan.data_inputs}
    missing = sorted(known.keys() - share.keys())
    stray = sorted(share.keys() - known.keys() - set(plan.unread_inputs))
    if missing or stray:
        what = f"no data for input {missing[0]!r}" if missing else f"data for {stray[0]!r}, which is no input"
        raise BadData(what, at=at, fix=f"supply {sorted(known)} and nothing else")
    for name, data_input in known.items():
        _check_part(plan, data_input, share[name], replica, at)
        check_values_taken(data_input, share[name], None, f"{at}, ")


def _check_part(plan: Plan, data_input: DataInput, array: Array, replica: int, at: str) -> None:
    refuse_empty(data_input, array, f"{at}, ")
    declared = list(data_input.shape)
    axis = data_input.sample_axis
    if axis is not None and plan.batch == "global" and isinstance(whole := declared[axis], int):
        first, stop = part_range(whole, plan.replicas, replica)
        declared[axis] = stop - first
    fits = array.ndim == len(declared) and all(
        not isinstance(size, int) or actual == size
        for actual, size in zip(array.shape, declared, strict=True)
    )
    if not fits or array.dtype != np.dtype(data_input.dtype):
        raise BadData(
            f"{array.dtype}{list(array.shape)} for one replica, which reads {data_input.dtype}{declared}",
            at=f"{at}, data input {data_input.name!r}",
            fix=f"supply one replica's samples, of type {data_input.dtype}, shaped {declared}",
        )
    if axis is not None:
        _check_microbatches(plan, data_input, array.shape[axis], f"{at}, ")


def join_shares(plan: Plan, shares: Sequence[Batch]) -> dict[str, Array]:
    """Return the total batch of what all replicas are fed; of inputs that they share, the first's."""
    return {
        entry.name: np.asarray(shares[0][entry.name])
        if entry.sample_axis is None
        else np.concatenate([share[entry.name] for share in shares], axis=entry.sample_axis)
        for entry in plan.data_inputs
    }


def inputs_of(plan: Plan, rank: Rank) -> tuple[DataInput, ...]:
    """Return the inputs that a rank is fed: servers only read what is not split, and the idle nothing."""
    if IDLE in rank.sites:
        return ()
    return tuple(
        data_input
        for data_input in plan.data_inputs
        if rank.replica is not None or data_input.sample_axis is None
    )


def copied(batch: Batch) -> dict[str, Array]:
    """Return a batch in arrays of its own: an iterator may fill those that it gave before with the next.

    Raises BadData where one has a mask.
    """
    return {
        name: np.array(unmasked(array, f"data input {name!r}"))
        if isinstance(array, np.ndarray | np.generic)
        else array
        for name, array in batch.items()
    }


def share_of(plan: Plan, rank: Rank, batch: Batch) -> dict[str, Array]:
    """Return what one rank is fed of a total batch."""
    return {
        data_input.name: share_of_input(plan, rank, data_input, batch[data_input.name])
        for data_input in inputs_of(plan, rank)
    }


def index_in_total(
    plan: Plan, rank: Rank | None, data_input: DataInput, index: tuple[int, ...]
) -> tuple[int, ...]:
    """Return where an element of a rank's share lies in the total batch; `rank` None: it is that already."""
    axis = data_input.sample_axis
    declared = None if axis is None else total_shape(plan, data_input)[axis]
    if axis is None or rank is None or rank.replica is None or not isinstance(declared, int):
        return index
    first, _ = part_range(declared, plan.replicas, rank.replica)
    return (*index[:axis], index[axis] + first, *index[axis + 1 :])


def share_of_input(plan: Plan, rank: Rank, data_input: DataInput, array: Fed) -> Array:
    """Return what one rank is fed of one input's total batch."""
    axis = data_input.sample_axis
    if axis is None or rank.replica is None:
        return np.asarray(array)
    index = [slice(None)] * array.ndim
    index[axis] = slice(*part_range(array.shape[axis], plan.replicas, rank.replica))
    return np.asarray(np.asarray(array)[tuple(index)], order="C")
