"""The tensors that a step begins and ends with: variables and how they start, data inputs, draws."""

from typing import Literal

from partc.runtime.plan.record import Range, Record


class Constant(Record, frozen=True, tag="constant"):
    """Every element has one value."""

    value: float


class Normal(Record, frozen=True, tag="normal"):
    """Independent normal draws, reproducible row by row (see runtime/data/initial.py)."""

    mean: float
    scale: float
    seed: int


class Uniform(Record, frozen=True, tag="uniform"):
    """Independent uniform draws on [low, high), reproducible row by row."""

    low: float
    high: float
    seed: int


class Stored(Record, frozen=True, tag="stored"):
    """Tensor `key` of a safetensors file in the plan's folder."""

    file: str
    key: str


class Made(Record, frozen=True, tag="made"):
    """Output `output` of an ONNX graph without inputs, executed whole by each owner."""

    file: str
    output: str


Initial = Constant | Normal | Uniform | Stored | Made


class PlanVariable(Record, frozen=True):
    """One variable of the single-device graph and where it went."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    initial: Initial
    role: Literal["parameter", "slot", "other"]  # slot: shaped and updated with a parameter
    parameter: str | None = None  # of a slot
    sparse: bool = False
    method: Literal["all_reduce", "all_gather", "servers", "replicated"] = "replicated"


class Box(Record, frozen=True):
    """A part of a tensor: for every axis the index ranges of its factors (see runtime/plan/boxes.py).

    An axis is the ordered product of its factors, outermost first: fused QKV weights [H, 3 H] are
    ((H,), (3, H)), and ranges (((0, H),), ((0, 3), (0, H // 2))) the first half of each of the three.
    """

    factored: tuple[tuple[int, ...], ...]  # axis -> sizes of its factors
    ranges: tuple[tuple[Range, ...], ...]  # axis -> a range of every factor


class VariablePiece(Record, frozen=True, omit_defaults=True):
    """A variable, or a part of it, kept by one rank as value `value`.

    The value is the local tensor of the box: the ranges of an axis multiplied.
    """

    variable: str
    value: str
    box: Box | None = None  # None: the whole variable


class TakenValues(Record, frozen=True, omit_defaults=True):
    """What an integer input may hold: numbers from `low` on, below `high`, and those that are `ignored`."""

    high: int
    ignored: tuple[int, ...] = ()
    low: int = 0


class DataInput(Record, frozen=True):
    """A tensor that the user feeds every step.

    `shape` is the single device's: symbolic sizes are strings. `sample_axis` is the axis along
    which it holds one entry per sample, None where all replicas read the same values. `high` is the
    exclusive upper bound of integer values where the graph tells (an index into a table, a class);
    `taken`: what its values are held to, None where the graph takes any.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    sample_axis: int | None
    high: int | None = None
    taken: TakenValues | None = None


class DrawnInput(Record, frozen=True, omit_defaults=True):
    """A tensor that the runtime draws anew every step, where the user's graph has an op that draws.

    `shape` is the single device's, as a data input's; a symbolic size may be a product, as "20*batch".
    `sample_axis` is the axis along which it holds entries of the samples, each `outer` times: T times
    where [T, B] was made one axis. None: all replicas draw the same. (See runtime/data/step_draws.py.)
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    distribution: Normal | Uniform  # seed: the node's own, or else the node's place among those that draw
    follows_run: bool  # the node has no seed of its own: the run's seed counts as well
    like: str | None = None  # the tensor that it is shaped like
    sample_axis: int | None = None
    outer: int = 1


class ShardInput(Record, frozen=True):
    """A scalar that the runtime gives every replica: how many shards the data has, or its own shard."""

    name: str
    dtype: str
    holds: Literal["num_shards", "shard_id"]
