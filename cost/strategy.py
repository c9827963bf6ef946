"""Every synchronisation decision of a compilation, as JSON that a person can edit and give back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from partc.runtime.errors import BadStrategy
from partc.runtime.plan.plan_json import NOT_DECODED, why_not_decoded
from partc.runtime.plan.program import Aggregation, Rounding
from partc.runtime.plan.record import Record
from partc.runtime.plan.written_json import decode_written
from partc.runtime.whole_file import write_whole

STRATEGY_FORMAT = "partc-strategy/1"  # every worker is a replica
MESH_STRATEGY_FORMAT = "partc-strategy/2"  # workers are a mesh of several axes

Method = Literal["all_reduce", "all_gather", "servers"]
Mechanism = Literal["local-aggregation", "post-aggregation", "boundary-ops"]
Batch = Literal["per-replica", "global"]
Mode = Literal["auto", "hybrid", "allreduce", "ps"]  # see synchronisation.py


class Shard(Record, frozen=True):
    """Rows [start, stop) of axis 0, owned by the server of `host`."""

    host: str
    start: int
    stop: int


class Synchronisation(Record, frozen=True, omit_defaults=True):
    """How one parameter's gradient is summed. Its slots and averages follow it.

    all_reduce  every worker keeps the parameter; gradients are summed everywhere
    all_gather  every worker keeps the parameter; the rows of all workers go to everybody
    servers     the servers own `shards`; workers pull what they need and push gradients

    The rest is for servers alone (parallax.txt, section 5.3.2):
    local_aggregation  rows are asked for and summed once per host before they cross the network
    post_aggregation   where ops between the summed gradient and the update run
    on_servers         nodes between pull and main computation that the servers run: what crosses
                       the network is their result
    """

    method: Method
    shards: tuple[Shard, ...] = ()
    local_aggregation: bool = True
    post_aggregation: Literal["worker", "server"] = "server"
    on_servers: tuple[str, ...] = ()


class AxisSplit(Record, frozen=True, omit_defaults=True):
    """A dimension that is split: an axis of a tensor, or its inner factor behind `outer` blocks."""

    axis: int
    outer: Annotated[int, msgspec.Meta(ge=1)] = 1


class OpConfig(Record, frozen=True, omit_defaults=True):
    """What ops split, and who runs them.

    op       a name of a node, or of what nodes' names start with up to a `/`; `*` and `?` stand for anything
    split    dimension -> mesh axes, `data*tensor` for several, or the number of parts (dimensions:
             passes/layouts/dimension_wishes.py); empty: they are whole; left out: as their operands are
    stage    the grid that runs them
    devices  those that run them, a mesh of their own: as many as the parts of `split` multiplied; `split`
             left out: they divide the samples

    Without a stage and devices, ops run where the last of those do that make their operands.
    """

    op: str
    split: dict[str, int | str] | None = None
    stage: Annotated[int, msgspec.Meta(ge=0)] | None = None
    devices: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ()


class Strategy(Record, frozen=True, omit_defaults=True):
    """A synchronisation per trained parameter, and how the replicas' gradients become one.

    parameters       of those left out, gradients are all-reduced, and of tables the rows read are gathered
    recompute_bytes  what a step's values may take at once on a worker; others are computed again
    mesh             axis -> parts: the workers in their order as a grid, whose first axis tells replicas
                     apart. Empty: every worker is a replica
    devices          the workers that the mesh is made of, in its order; left out: all of the cluster
    variables        variable -> mesh axis -> the dimension that is split there, where not whole on every
                     worker. What follows a parameter is split alike
    ops              what ops split, where not what follows from their operands; the last that fits an op
    stages           meshes of that shape that follow each other in a pipeline, of the workers in their order
    microbatches     parts of each replica's batch that pass through one after the other
    round_sums       the type to which dense gradients are rounded before they are sent
    """

    format: str
    batch: Batch
    parameters: dict[str, Synchronisation] = msgspec.field(default_factory=dict)
    aggregation: Aggregation = Aggregation()
    recompute_bytes: Annotated[int, msgspec.Meta(ge=1)] | None = None
    mesh: dict[str, int] = msgspec.field(default_factory=dict)
    devices: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ()
    variables: dict[str, dict[str, AxisSplit]] = msgspec.field(default_factory=dict)
    ops: tuple[OpConfig, ...] = ()
    stages: Annotated[int, msgspec.Meta(ge=1)] = 1
    microbatches: Annotated[int, msgspec.Meta(ge=1)] = 1
    round_sums: Rounding = ""

    @property
    def has_meshes(self) -> bool:
        """Tell whether the workers are more than replicas: a grid, or operators' own devices."""
        return bool(self.mesh) or any(config.devices for config in self.ops)

    @property
    def divides_more(self) -> bool:
        """Tell whether more is divided than samples and variables: operators, or a replica's batch."""
        is_grid = len(self.mesh) > 1 or self.stages * self.microbatches > 1
        return is_grid or bool(self.ops)


@dataclass(frozen=True, slots=True)
class SyncFacts:
    """What the choice of a synchronisation needs to know about one parameter."""

    name: str
    rows: int  # length of axis 0; 1 for a scalar
    row_bytes: int
    slot_row_bytes: int  # of slots and averages that follow the parameter, together, per row
    sparse: bool
    touched_rows: float  # distinct rows that one replica is expected to touch in a step
    servable: bool = True  # may its rows live on servers
    reducible: bool = True  # may its gradient be all-reduced: an update of read rows alone may not
    has_post_aggregation: bool = False  # are there ops between its summed gradient and its update
    boundary_ops: tuple[str, ...] = ()  # light nodes behind it that servers may run
    boundary_share: float = 1.0  # bytes that workers fetch if servers run them, of those without
    # Measured: (replicas, rows that so many touch together), ascending from 1. Empty: assumed.
    distinct: tuple[tuple[int, float], ...] = ()
    spread: tuple[int, ...] = ()  # measured, as row_spread.py has it. Empty: all rows alike

    @property
    def bytes(self) -> int:
        """Return the parameter's own size."""
        return self.rows * self.row_bytes

    @property
    def rows_are_assumed(self) -> bool:
        """Tell whether the rows that a step touches are assumed, and not measured."""
        return self.sparse and not self.distinct


def encode_strategy(strategy: Strategy) -> bytes:
    """Return strategy.json: equal strategies give equal bytes.

    The axes of a mesh and the dimensions of a split keep their order, which tells who has which part.
    """
    variables = {name: dict(sorted(splits.items())) for name, splits in sorted(strategy.variables.items())}
    parameters = dict(sorted(strategy.parameters.items()))
    in_order = msgspec.structs.replace(strategy, variables=variables, parameters=parameters)
    return msgspec.json.format(msgspec.json.encode(in_order), indent=1) + b"\n"


def write_strategy(strategy: Strategy, path: Path) -> None:
    """Write strategy.json. Raises OSError."""
    write_whole(path, encode_strategy(strategy))


def read_strategy(path: Path) -> Strategy:
    """Read strategy.json. Raises BadStrategy; `strategy_check.check_strategy` holds it to a model."""
    text = b""
    try:
        text = path.read_bytes()
        strategy = decode_written(text, Strategy)
    except OSError as error:
        raise BadStrategy(
            f"cannot be read: {error.strerror}", at=str(path), fix="give the path of a strategy file"
        ) from error
    except NOT_DECODED as error:
        what, _, where = why_not_decoded(error, text).partition(" - at ")
        raise BadStrategy(
            what,
            at=f"{path}: {where.strip('`') or 'the file as a whole'}",
            fix=f'a file has at least {{"format": "{MESH_STRATEGY_FORMAT}", "batch": "global"}}, and any of '
            f"{', '.join(Strategy.__struct_fields__[2:])}; compare with a strategy.json that "
            "compile wrote, and with cost/strategy.schema.json",
        ) from error
    if strategy.format not in (STRATEGY_FORMAT, MESH_STRATEGY_FORMAT):
        raise BadStrategy(
            f"a strategy of format {strategy.format!r}",
            at=f"{path}: format",
            fix=f"this version of partc reads {STRATEGY_FORMAT!r} and {MESH_STRATEGY_FORMAT!r}: compile "
            "again with --strategy auto",
        )
    if strategy.format == STRATEGY_FORMAT and (beyond := _entries_of_meshes(strategy)):
        raise BadStrategy(
            f"{beyond[0]!r} in a strategy of format {STRATEGY_FORMAT!r}",
            at=f"{path}: format",
            fix=f"write {MESH_STRATEGY_FORMAT!r}",
        )
    return strategy


def _entries_of_meshes(strategy: Strategy) -> list[str]:
    """Return the entries of a strategy that its second format alone has."""
    entries: dict[str, object] = {
        "mesh": strategy.mesh,
        "devices": strategy.devices,
        "variables": strategy.variables,
        "ops": strategy.ops,
    }
    entries |= {"stages": strategy.stages > 1, "microbatches": strategy.microbatches > 1}
    return [name for name, is_given in entries.items() if is_given]
