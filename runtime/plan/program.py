"""The plan: what every rank of a cluster does in one training step.

A *rank* is one executor process. It plays one or two *sites*: `worker` (computes a replica, or with
others a part of one) or, in a pipeline, one of the stages that workers are divided into, and
`server` (owns variables, sums what its host's workers send). All ranks share one list of
instructions; a rank executes those of its sites, in the list's order, so two ranks can never meet
their communications in different orders.

The executor keeps an *environment*: value name -> tensor. Some values live inside *buffers*
(contiguous memory, so that one collective moves many tensors without a copy): a `Slice` says where.

    instructions   Run      reads and writes values through one ONNX segment
                   Start    begins a communication among a group of ranks
                   Wait     its written values may be read from here on
                   Store    copies a value into a variable (where in-place update is not proven safe)
"""

from typing import Literal

import msgspec

from partc.runtime.plan.record import Range, Record
from partc.runtime.plan.variables import DataInput, DrawnInput, PlanVariable, ShardInput, VariablePiece

PLAN_FORMAT = "partc-plan/7"

Site = str  # worker, server, or a stage of workers: stage0, stage1, ...
IDLE: Site = "idle"  # of a worker whom no operator was given


# ---------------------------------------------------------------- instructions


# The key of nodes that vanish in others when a session is opened: measured kernels have what they take.
ABSORBED = "absorbed"


class KernelWork(Record, frozen=True, array_like=True):
    """Equal kernels of a segment, and what they do together.

    `key`: what they are, as passes/scheduling/kernels.py tells it, or ABSORBED.
    """

    key: str
    count: int
    flops: int
    touched_bytes: int
    streamed_bytes: int
    sorted_ids: int
    packed_bytes: int = 0


class Run(Record, frozen=True, tag="run"):
    """Execute one segment at one site.

    `reads` and `writes` pair a segment's input or output with a value of the environment. A value
    that is written and lives in a buffer, or that is a variable, is bound in place.
    """

    site: Site
    segment: str  # path in the plan's folder, such as segments/1f0c.onnx
    reads: tuple[tuple[str, str], ...]  # (segment input, value)
    writes: tuple[tuple[str, str], ...]  # (segment output, value)
    one_thread: bool = False  # ScatterND with duplicate indices races on two threads
    flops: int = 0  # floating-point operations, for the cost model
    touched_bytes: int = 0  # bytes read and written by its nodes, for the cost model
    streamed_bytes: int = 0  # of these, those of nodes that do little with them
    nodes: int = 0  # functions taken apart
    sorted_ids: int = 0  # ids that are put in order
    packed_bytes: int = 0  # of matrices that a CPU arranges anew for each product with several rows
    write_bytes: tuple[int, ...] = ()  # expected, of each write; 0 where it has memory or no known size
    inner_bytes: int = 0  # the most that its nodes have made at once, without what has memory
    kernels: tuple[KernelWork, ...] = ()  # of that work, what could be measured by itself


Kind = Literal[
    "all_reduce",  # in place; every member ends with the reduction
    "reduce",  # in place at the root, the group's first rank
    "broadcast",  # from the root to all
    "reduce_scatter",  # a buffer of sum(counts) elements; member i keeps region i, reduced
    "all_gather",  # a buffer of sum(counts) elements; member i supplies region i
    "shift_ahead",  # member i's value goes to member i + 1; the first member ends with zeros
    "shift_back",  # member i's value goes to member i - 1; the last member ends with zeros
    "exchange",  # of the regions of a tensor that members have, those that each wants go to it
    "gather_rows",  # members' leading axes are concatenated at the root, in group order
    "scatter_rows",  # the reverse: the root's leading axis is cut by counts
    "all_gather_rows",  # as gather_rows, but every member ends with the whole
    "all_to_all_rows",  # each member cuts its leading axis by its counts; piece j goes to member j
]


class RowShape(Record, frozen=True):
    """One row of a value that travels by rows: its element type, and the sizes behind the leading axis."""

    dtype: str
    shape: tuple[int, ...]


# A float type of 16 bits, as numpy names it; empty: values travel as they are.
Rounding = Literal["", "float16", "bfloat16"]

Region = tuple[tuple[Range, ...], ...]  # of a tensor: for every axis ascending index ranges


class Move(Record, frozen=True):
    """A region that goes from one member of a group to another, or stays; members by their positions."""

    source: int
    target: int
    region: Region


class Exchange(Record, frozen=True):
    """What the members of a group have of a tensor, what each ends with, and what is sent for that."""

    dtype: str
    shape: tuple[int, ...]  # the whole tensor's
    has: tuple[Region | None, ...]
    wants: tuple[Region | None, ...]
    moves: tuple[Move, ...]


class Start(Record, frozen=True, tag="start", omit_defaults=True):
    """Begin a communication. A rank outside the group skips it.

    Dense kinds (`all_reduce` .. `shift_back`) move whole values whose sizes all members know; a
    value written under the same name as it is read is handled in place. `counts` are elements per
    member, in group order, for `reduce_scatter` and `all_gather`.

    Row kinds move values whose leading axis differs from rank to rank and step to step, several
    values of equal leading size together. Sizes are exchanged by the transport.
      gather_rows       writes = one whole per read, then counts int64[group]
      all_gather_rows   writes = one whole per read, then counts int64[group]
      all_to_all_rows   reads  = values, then send counts int64[group]
                        writes = one per value, then receive counts int64[group]
      scatter_rows      reads  = values, then counts int64[group]; writes = one per value

    Only members that play `senders` supply `reads` (the others supply zeros, or no rows), and only
    members that play `receivers` end up with `writes`. A `scatter_rows` count is 0 for a member
    that is not a receiver.
    """

    tag_id: int
    kind: Kind
    group: str  # a key of Plan.groups
    senders: Site
    receivers: Site
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    reduction: Literal["sum", "max", "min"] = "sum"
    counts: tuple[int, ...] = ()
    payload_bytes: int = 0  # expected: the whole value of dense kinds, one member's part of rows
    label: str = ""  # what a person calls it, for the report and traces
    words: str = ""  # what it moves between whom, in the user's names: for comparisons
    rows: tuple[RowShape, ...] = ()  # of row kinds, one per value; empty: as the senders tell
    exchange: Exchange | None = None  # of that kind
    rounds_to: Rounding = ""  # of all_reduce and reduce_scatter: what is sent; it is summed in float32
    by_levels: bool = False  # of all_reduce: within hosts first, then among their first members, and back


class Wait(Record, frozen=True, tag="wait", omit_defaults=True):
    """The communication `tag_id` is complete from here on, at `site` where only its ranks wait here."""

    tag_id: int
    site: Site | None = None


class Store(Record, frozen=True, tag="store"):
    """Copy value `source` into variable value `target`."""

    site: Site
    source: str
    target: str


Instruction = Run | Start | Wait | Store


# ---------------------------------------------------------------- memory


class Buffer(Record, frozen=True):
    """Contiguous memory that every rank playing one of `sites` allocates."""

    name: str
    dtype: str  # numpy name: float32, float64, float16, int64, ...
    elements: int
    sites: tuple[Site, ...]
    memory: str | None = None  # the buffer in whose memory it lies, at another time; None: its own


class Slice(Record, frozen=True):
    """A value that lives in a buffer, contiguous, C order."""

    value: str
    buffer: str
    offset: int  # elements
    shape: tuple[int, ...]


# ---------------------------------------------------------------- outputs


class Aggregation(Record, frozen=True, omit_defaults=True):
    """How replicas' gradients are put together, and which results workers may read.

    average_dense, average_sparse: the mean over all replicas; False: the sum
    fetched: parameters whose aggregated gradients are outputs of the step
    replica_outputs: beside the mean of a scalar output, each replica's own is one: NAME.replica
    """

    average_dense: bool = True
    average_sparse: bool = True
    fetched: tuple[str, ...] = ()
    replica_outputs: bool = False


class Output(Record, frozen=True, omit_defaults=True):
    """A fetched output of the graph, which the ranks of `site` have.

    whole: every worker has it. split: worker r has its piece along `axis`. per_replica: every
    worker has its own value.
    """

    name: str
    value: str
    layout: Literal["whole", "split", "per_replica"]
    axis: int | None = None
    site: Site = "worker"


# ---------------------------------------------------------------- ranks and plan


class Rank(Record, frozen=True):
    """One executor process."""

    rank: int
    host: str
    device: str
    kind: Literal["cpu", "gpu"]
    device_index: int  # GPU ordinal on its host, or 0
    threads: int
    sites: tuple[Site, ...]
    replica: int | None  # the copy of the main computation that it works on, maybe with others
    groups: dict[str, int]  # which one of Plan.groups it is a member of
    constants: dict[str, tuple[int, ...]]  # value -> int64 vector; Plan.constants are every rank's
    slices: tuple[Slice, ...]
    pieces: tuple[VariablePiece, ...]  # of variables, that it keeps from step to step


def place_of(host: str, device: str) -> str:
    """Name a device with its host, for messages: most devices' names begin with that."""
    return device if device.startswith(f"{host}/") else f"{host}/{device}"


class SessionWorker(Record, frozen=True):
    """A worker of asynchronous training, and the device that takes the place of the plan's one worker."""

    host: str
    device: str
    kind: Literal["cpu", "gpu"]
    device_index: int
    threads: int


class Recomputed(Record, frozen=True):
    """What is computed twice in a step, so that fewer values exist at once on a worker."""

    limit_bytes: int  # as asked
    before_bytes: int  # the most that would exist at once
    after_bytes: int
    values: int  # nodes that run again
    flops: int


class Plan(Record, frozen=True):
    """Everything that a cluster needs to train one model, as written to plan.json.

    With `asynchronous` workers the ranks are one session: one worker and all servers. Every worker has
    such a session with the servers, and they do not wait for each other (docs/asynchronous.md).
    `departures` tell how a batch per replica would differ from one device on all batches: a plan for a
    global batch may have been made for that reason.
    """

    format: str
    model: str  # file name of the training graph, in the plan's folder
    batch: Literal["per-replica", "global"]
    replicas: int
    sizes: dict[str, int]  # symbolic size -> the value assumed for pricing and synthetic data
    loss: str | None
    ranks: tuple[Rank, ...]
    groups: dict[str, tuple[tuple[int, ...], ...]]  # of ranks that meet under a name; the first is the root
    instructions: tuple[Instruction, ...]
    buffers: tuple[Buffer, ...]
    slices: tuple[Slice, ...]
    variables: tuple[PlanVariable, ...]
    data_inputs: tuple[DataInput, ...]
    outputs: tuple[Output, ...]
    predicted_step_s: float
    cost_cache_sha256: str  # of the rates that prices came from
    files: dict[str, str]  # path in the plan's folder -> SHA-256
    asynchronous: tuple[SessionWorker, ...] = ()
    shard_inputs: tuple[ShardInput, ...] = ()
    drawn_inputs: tuple[DrawnInput, ...] = ()
    aggregation: Aggregation = Aggregation()
    recomputed: Recomputed | None = None
    unread_inputs: tuple[str, ...] = ()  # data for them is accepted, and not looked at
    departures: tuple[str, ...] = ()
    # value -> int64 vector, the same on all ranks
    constants: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    microbatches: int = 1  # into which every replica's batch is divided
    asked_strategy: str = "auto"  # the name that was asked for; nothing: strategy.json is the user's own
    sha256: str = ""  # of all the rest, as plan_json.py writes it: a plan that was edited does not fit it


def members_of(plan: Plan, group: str, rank: Rank) -> tuple[int, ...]:
    """Return the ranks that a rank meets in a group; the first is the root."""
    return plan.groups[group][rank.groups[group]]


def rounding_of(plan: Plan) -> Rounding:
    """Return the type to which a plan rounds what ranks sum; empty if it rounds nothing."""
    return next((i.rounds_to for i in plan.instructions if isinstance(i, Start) and i.rounds_to), "")


def instructions_of(plan: Plan, rank: Rank) -> tuple[Instruction, ...]:
    """Return rank's program: the shared list without what is not its business."""
    return tuple(instruction for _, instruction in numbered_instructions_of(plan, rank))


def numbered_instructions_of(plan: Plan, rank: Rank) -> tuple[tuple[int, Instruction], ...]:
    """Return rank's program with the instructions' places in the shared list."""
    waited = {i.tag_id for i in plan.instructions if isinstance(i, Start) and i.group in rank.groups}
    sites, sites_of_waits = frozenset(rank.sites), frozenset((None, *rank.sites))

    def concerns(instruction: Instruction) -> bool:
        if isinstance(instruction, Start):
            return instruction.tag_id in waited
        if isinstance(instruction, Wait):
            return instruction.tag_id in waited and instruction.site in sites_of_waits
        return instruction.site in sites

    return tuple(
        (at, instruction) for at, instruction in enumerate(plan.instructions) if concerns(instruction)
    )
