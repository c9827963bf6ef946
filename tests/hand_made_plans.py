"""Small plans written by hand, for the tests of the runtime. Nothing here comes from the compiler."""

import hashlib
from pathlib import Path

import numpy as np
import onnx

from partc.runtime.program import (
    PLAN_FORMAT,
    Buffer,
    DataInput,
    Held,
    Instruction,
    Output,
    Plan,
    PlanVariable,
    Rank,
    Run,
    Slice,
    Start,
    Uniform,
    Wait,
    encode_plan,
)

GRADIENT = """
gradient (double[b,3] x, double[b,2] y, double[3,2] W) => (double[3,2] dW, double loss) {
    xt = Transpose <perm = [1, 0]> (x)
    p = MatMul (x, W)
    e = Sub (p, y)
    samples = Constant <value = double {SAMPLES}> ()
    scaled = Div (e, samples)
    dW = MatMul (xt, scaled)
    squared = Mul (e, scaled)
    loss = ReduceSum <keepdims = 0> (squared)
}
"""
UPDATE = """
update (double[r,2] W, double[r,2] dW) => (double[r,2] W_next) {
    lr = Constant <value = double {0.1}> ()
    step = Mul (lr, dW)
    W_next = Sub (W, step)
}
"""
ROUTE = """
route (int64[n] ids, int64[m] low, int64[m] high) => (int64[u] unique, int64[n] inverse, int64[m] counts) {
    unique, first, inverse, occurrences = Unique <sorted = 1> (ids)
    last = Constant <value_ints = [1]> ()
    column = Unsqueeze (unique, last)
    above = GreaterOrEqual (column, low)
    below = Less (column, high)
    inside = And (above, below)
    ones = Cast <to = 7> (inside)
    axis = Constant <value_ints = [0]> ()
    counts = ReduceSum <keepdims = 0> (ones, axis)
}
"""
LOOK_UP = """
look_up (double[s,2] E, int64[n] ids, int64[1] first) => (double[n,2] rows) {
    local = Sub (ids, first)
    rows = Gather <axis = 0> (E, local)
}
"""
ROW_GRADIENT = """
row_gradient (double[u,2] rows, int64[n] inverse, double[n,2] t)
    => (double[u,2] sums, double loss) {
    used = Gather <axis = 0> (rows, inverse)
    e = Sub (used, t)
    zeros = Sub (rows, rows)
    last = Constant <value_ints = [1]> ()
    positions = Unsqueeze (inverse, last)
    sums = ScatterND <reduction = "add"> (zeros, positions, e)
    squared = Mul (e, e)
    loss = ReduceSum <keepdims = 0> (squared)
}
"""
ROW_UPDATE = """
row_update (double[s,2] E, int64[n] ids, double[n,2] rows, int64[1] first) => (double[s,2] E_next) {
    local = Sub (ids, first)
    last = Constant <value_ints = [1]> ()
    positions = Unsqueeze (local, last)
    minus = Constant <value = double {-0.1}> ()
    steps = Mul (minus, rows)
    E_next = ScatterND <reduction = "add"> (E, positions, steps)
}
"""


def write_plan(plan: Plan, folder: Path, segments: dict[str, str]) -> Path:
    """Write the plan and its segments (name -> ONNX text) as a plan folder."""
    (folder / "segments").mkdir(parents=True)
    files = {}
    for name, text in segments.items():
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
        content = model.SerializeToString()
        (folder / name).write_bytes(content)
        files[name] = hashlib.sha256(content).hexdigest()
    (folder / "plan.json").write_bytes(encode_plan(with_changes(plan, files=files)))
    return folder


def with_changes(plan: Plan, **changes: object) -> Plan:
    """Return the plan with some fields replaced."""
    return Plan(**({name: getattr(plan, name) for name in plan.__struct_fields__} | changes))


def segment(name: str) -> str:
    return f"segments/{name}.onnx"


def same(*names: str) -> tuple[tuple[str, str], ...]:
    """Pair segment inputs or outputs with values of the same names; "a=b" pairs a with b."""
    return tuple((name.split("=")[0], name.split("=")[-1]) for name in names)


def run(site: str, name: str, reads: tuple[str, ...], writes: tuple[str, ...]) -> Run:
    return Run(site, segment(name), same(*reads), same(*writes), one_thread=True)


def rank(
    number: int,
    sites: tuple[str, ...],
    replica: int | None,
    groups: dict[str, tuple[int, ...]],
    *,
    held: tuple[Held, ...] = (),
    slices: tuple[Slice, ...] = (),
    constants: dict[str, tuple[int, ...]] | None = None,
) -> Rank:
    return Rank(
        number, "alpha", f"cpu{number}", "cpu", 0, 1, sites, replica, groups, constants or {}, slices, held
    )


def plan_of(
    ranks: list[Rank],
    instructions: list[Instruction],
    *,
    variables: tuple[PlanVariable, ...] = (),
    data_inputs: tuple[DataInput, ...] = (),
    buffers: tuple[Buffer, ...] = (),
    slices: tuple[Slice, ...] = (),
    outputs: tuple[Output, ...] = (),
) -> Plan:
    return Plan(
        format=PLAN_FORMAT,
        model="train.onnx",
        batch="per-replica",
        replicas=sum(rank.replica is not None for rank in ranks),
        sizes={"n": 5},
        loss="loss" if any(output.name == "loss" for output in outputs) else None,
        ranks=tuple(ranks),
        instructions=tuple(instructions),
        buffers=buffers,
        slices=slices,
        variables=variables,
        data_inputs=data_inputs,
        outputs=outputs,
        predicted_step_s=0.0,
        cost_cache_sha256="",
        files={},
    )


LINEAR_INPUTS = (DataInput("x", "float64", (4, 3), 0), DataInput("y", "float64", (4, 2), 0))
LINEAR_W = PlanVariable("W", "float64", (3, 2), Uniform(-1.0, 1.0, 7), "parameter", method="all_reduce")


def linear_all_reduce(folder: Path, replicas: int) -> Path:
    """Least squares by SGD: the gradient and the loss in one bucket, all-reduced."""
    everybody = tuple(range(replicas))
    ranks = [rank(r, ("worker",), r, {"all": everybody}, held=(Held("W", "W"),)) for r in everybody]
    instructions = [
        run("worker", "gradient", ("x", "y", "W"), ("dW", "loss")),
        Start(0, "all_reduce", "all", "worker", "worker", ("bucket",), ("bucket",), label="bucket"),
        Wait(0),
        run("worker", "update", ("W", "dW"), ("W_next=W",)),
    ]
    plan = plan_of(
        ranks,
        instructions,
        variables=(LINEAR_W,),
        data_inputs=LINEAR_INPUTS,
        buffers=(Buffer("bucket", "float64", 7, ("worker",)),),
        slices=(Slice("dW", "bucket", 0, (3, 2)), Slice("loss", "bucket", 6, ())),
        outputs=(Output("loss", "loss", "whole"),),
    )
    gradient = GRADIENT.replace("SAMPLES", str(4 * replicas))
    return write_plan(plan, folder, {segment("gradient"): gradient, segment("update"): UPDATE})


def linear_servers(folder: Path, *, merged: bool, scattered: bool) -> Path:
    """The same with W on servers, two workers: rows on two servers, or whole on one.

    scattered: reduce_scatter and all_gather; else reduce and broadcast. Merged: rank 0 (and 1) serve too.
    """
    if scattered:
        ranks = _sharded_ranks(merged)
        counts = (4, 2) if merged else (0, 0, 4, 2)
    else:
        ranks = _one_server_ranks(merged)
        counts = ()
    pull = ("all_gather", "reduce_scatter") if scattered else ("broadcast", "reduce")
    instructions = [
        Start(0, pull[0], "all", "server", "worker", ("W_owned",), ("W",), counts=counts, label="pull W"),
        Wait(0),
        run("worker", "gradient", ("x", "y", "W"), ("dW", "loss")),
        Start(1, pull[1], "all", "worker", "server", ("dW",), ("dW",), counts=counts, label="push dW"),
        Start(2, "all_reduce", "workers", "worker", "worker", ("loss",), ("total",), label="loss"),
        Wait(1),
        run("server", "update", ("W=W_owned", "dW=dW_owned"), ("W_next=W_owned",)),
        Wait(2),
    ]
    plan = plan_of(
        ranks,
        instructions,
        variables=(LINEAR_W,),
        data_inputs=LINEAR_INPUTS,
        buffers=(
            Buffer("weights", "float64", 6, ("worker",)),
            Buffer("gradients", "float64", 6, ("worker", "server")),
        ),
        slices=(Slice("W", "weights", 0, (3, 2)), Slice("dW", "gradients", 0, (3, 2))),
        outputs=(Output("loss", "total", "whole"),),
    )
    gradient = GRADIENT.replace("SAMPLES", "8")
    return write_plan(plan, folder, {segment("gradient"): gradient, segment("update"): UPDATE})


def _sharded_ranks(merged: bool) -> list[Rank]:
    shards = (
        ((Held("W", "W_owned", 0, 2),), (Slice("dW_owned", "gradients", 0, (2, 2)),)),
        ((Held("W", "W_owned", 2, 3),), (Slice("dW_owned", "gradients", 4, (1, 2)),)),
    )
    if merged:
        groups = {"all": (0, 1), "workers": (0, 1)}
        return [
            rank(r, ("worker", "server"), r, groups, held=held, slices=slices)
            for r, (held, slices) in enumerate(shards)
        ]
    everybody = {"all": (0, 1, 2, 3)}
    workers = [rank(r, ("worker",), r, everybody | {"workers": (0, 1)}) for r in (0, 1)]
    servers = [
        rank(r, ("server",), None, everybody, held=held, slices=slices)
        for r, (held, slices) in enumerate(shards, 2)
    ]
    return workers + servers


def _one_server_ranks(merged: bool) -> list[Rank]:
    held = (Held("W", "W_owned"),)
    slices = (Slice("dW_owned", "gradients", 0, (3, 2)),)
    if merged:
        groups = {"all": (0, 1), "workers": (0, 1)}
        return [
            rank(0, ("worker", "server"), 0, groups, held=held, slices=slices),
            rank(1, ("worker",), 1, groups),
        ]
    everybody = {"all": (2, 0, 1)}
    workers = [rank(r, ("worker",), r, everybody | {"workers": (0, 1)}) for r in (0, 1)]
    return [*workers, rank(2, ("server",), None, everybody, held=held, slices=slices)]


TABLE = PlanVariable(
    "E", "float64", (8, 2), Uniform(-1.0, 1.0, 3), "parameter", sparse=True, method="servers"
)
TABLE_INPUTS = (DataInput("ids", "int64", ("n",), 0, high=8), DataInput("t", "float64", ("n", 2), 0))


def table_on_servers(folder: Path, *, merged: bool) -> Path:
    """An embedding table: ids out, rows back, gradients out, all by all_to_all_rows; two workers.

    Merged: rows 0..5 at rank 0, 5..8 at rank 1. Standalone: all rows at rank 2, none at rank 3.
    """
    everybody = (0, 1) if merged else (0, 1, 2, 3)
    bounds = ((0, 5), (5, 8)) if merged else ((0, 0), (0, 0), (0, 8), (8, 8))
    limits = {"low": tuple(low for low, _ in bounds), "high": tuple(high for _, high in bounds)}
    ranks = []
    for number in everybody:
        sites = ("worker", "server") if merged else (("worker",) if number < 2 else ("server",))
        constants = limits if "worker" in sites else {}
        held: tuple[Held, ...] = ()
        if "server" in sites:
            held = (Held("E", "E_owned", *bounds[number]),)
            constants = constants | {"first": bounds[number][:1]}
        replica = number if number < 2 else None
        groups = {"all": everybody} | ({"workers": (0, 1)} if number < 2 else {})
        ranks.append(rank(number, sites, replica, groups, held=held, constants=constants))
    plan = plan_of(
        ranks,
        _table_instructions(),
        variables=(TABLE,),
        data_inputs=TABLE_INPUTS,
        outputs=(Output("loss", "loss", "per_replica"), Output("total", "total", "whole")),
    )
    names = {"route": ROUTE, "look_up": LOOK_UP, "row_gradient": ROW_GRADIENT, "row_update": ROW_UPDATE}
    return write_plan(plan, folder, {segment(name): text for name, text in names.items()})


def _table_instructions() -> list[Instruction]:
    kind = "all_to_all_rows"
    return [
        run("worker", "route", ("ids", "low", "high"), ("unique", "inverse", "counts")),
        Start(
            0, kind, "all", "worker", "server", ("unique", "counts"), ("asked", "asked_counts"), label="ids"
        ),
        Wait(0),
        run("server", "look_up", ("E=E_owned", "ids=asked", "first"), ("rows=answer",)),
        Start(
            1,
            kind,
            "all",
            "server",
            "worker",
            ("answer", "asked_counts"),
            ("rows", "row_counts"),
            label="rows",
        ),
        Wait(1),
        run("worker", "row_gradient", ("rows", "inverse", "t"), ("sums", "loss")),
        Start(2, "all_reduce", "workers", "worker", "worker", ("loss",), ("total",), label="loss"),
        Start(
            3,
            kind,
            "all",
            "worker",
            "server",
            ("unique", "sums", "counts"),
            ("pushed", "pushed_rows", "pushed_counts"),
            label="push",
        ),
        Wait(3),
        run(
            "server",
            "row_update",
            ("E=E_owned", "ids=pushed", "rows=pushed_rows", "first"),
            ("E_next=E_owned",),
        ),
        Wait(2),
    ]


def rows_there_and_back(folder: Path, *, merged: bool) -> Path:
    """Rows gathered at a server and scattered back, and gathered by everybody. Two workers."""
    everybody = (0, 1) if merged else (2, 0, 1)
    groups = {"all": everybody, "workers": (0, 1)}
    ranks = [
        rank(0, ("worker", "server") if merged else ("worker",), 0, groups),
        rank(1, ("worker",), 1, groups),
    ]
    if not merged:
        ranks.append(rank(2, ("server",), None, {"all": everybody}))
    instructions = [
        Start(0, "gather_rows", "all", "worker", "server", ("ids", "t"), ("all_ids", "all_t", "counts")),
        Start(
            1, "all_gather_rows", "workers", "worker", "worker", ("t", "ids"), ("every_t", "every_id", "n")
        ),
        Wait(0),
        Start(2, "scatter_rows", "all", "server", "worker", ("all_t", "counts"), ("back",)),
        Wait(1),
        Wait(2),
    ]
    plan = plan_of(
        ranks,
        instructions,
        data_inputs=TABLE_INPUTS,
        outputs=(
            Output("back", "back", "split", 0),
            Output("every_t", "every_t", "whole"),
            Output("n", "n", "per_replica"),
        ),
    )
    return write_plan(plan, folder, {})


def linear_batches(replicas: int, steps: int) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    return [
        {"x": generator.normal(size=(4 * replicas, 3)), "y": generator.normal(size=(4 * replicas, 2))}
        for _ in range(steps)
    ]


def table_batches(steps: int, samples: int = 10) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(1)
    return [
        {"ids": generator.integers(0, 8, samples), "t": generator.normal(size=(samples, 2))}
        for _ in range(steps)
    ]


def linear_trained(W: np.ndarray, batches: list[dict[str, np.ndarray]]) -> tuple[np.ndarray, list[float]]:
    """Train as one device would."""
    losses = []
    for batch in batches:
        error = batch["x"] @ W - batch["y"]
        losses.append(float((error * error).sum() / len(error)))
        W = W - 0.1 * batch["x"].T @ error / len(error)
    return W, losses


def table_trained(E: np.ndarray, batches: list[dict[str, np.ndarray]]) -> np.ndarray:
    """Train as one device would."""
    E = E.copy()
    for batch in batches:
        error = E[batch["ids"]] - batch["t"]
        np.add.at(E, batch["ids"], -0.1 * error)
    return E


def reductions(folder: Path) -> Path:
    """One input per replica, all-reduced as float16, int64 and by maximum and minimum; two workers."""
    groups = {"all": (0, 1)}
    ranks = [rank(r, ("worker",), r, groups) for r in (0, 1)]
    kinds = {"half": "sum", "whole": "sum", "highest": "max", "lowest": "min"}
    dtypes = {"half": "float16", "whole": "int64", "highest": "float32", "lowest": "float64"}
    instructions: list[Instruction] = []
    for tag, (name, reduction) in enumerate(kinds.items()):
        instructions += [
            Start(tag, "all_reduce", "all", "worker", "worker", (name,), (f"{name}_out",), reduction),
            Wait(tag),
        ]
    plan = plan_of(
        ranks,
        instructions,
        data_inputs=tuple(DataInput(name, dtype, (3,), 0) for name, dtype in dtypes.items()),
        outputs=tuple(Output(name, f"{name}_out", "whole") for name in dtypes),
    )
    return write_plan(plan, folder, {})


def reduction_batch() -> dict[str, np.ndarray]:
    return {
        "half": np.arange(6, dtype=np.float16) / 8,
        "whole": np.arange(6) << 40,
        "highest": np.array([1, -2, 3, -4, 5, -6], np.float32),
        "lowest": np.array([1.0, -2, 3, -4, 5, -6]),
    }
