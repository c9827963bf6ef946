"""Hand-made plans that move rows, and reductions of every type."""

from pathlib import Path

import numpy as np

from partc.runtime.plan.boxes import rows_box
from partc.runtime.plan.program import Instruction, Output, Start, Wait
from partc.runtime.plan.variables import DataInput, PlanVariable, Uniform, VariablePiece
from tests.builders.plans.hand_made_plans import plan_of, rank, run, segment, write_plan

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
        pieces: tuple[VariablePiece, ...] = ()
        if "server" in sites:
            pieces = (VariablePiece("E", "E_owned", rows_box((8, 2), *bounds[number])),)
            constants = constants | {"first": bounds[number][:1]}
        replica = number if number < 2 else None
        groups = {"all": everybody} | ({"workers": (0, 1)} if number < 2 else {})
        ranks.append(rank(number, sites, replica, groups, pieces=pieces, constants=constants))
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


def rows_at_once(folder: Path) -> Path:
    """Three communications of rows and a reduction in one group, all under way at once; two workers."""
    groups = {"all": (0, 1)}
    ranks = [rank(r, ("worker",), r, groups, constants={"even": (2, 3)}) for r in (0, 1)]

    def gather(tag: int, value: str) -> Start:
        writes = (f"{value}_{tag}", f"n_{tag}")
        return Start(tag, "all_gather_rows", "all", "worker", "worker", (value,), writes)

    exchange = Start(
        2, "all_to_all_rows", "all", "worker", "worker", ("t", "even"), ("exchanged", "received")
    )
    reduction = Start(3, "all_reduce", "all", "worker", "worker", ("t",), ("sum",))
    waits = [Wait(tag) for tag in (3, 2, 1, 0)]
    plan = plan_of(
        ranks,
        [gather(0, "t"), gather(1, "ids"), exchange, reduction, *waits],
        data_inputs=TABLE_INPUTS,
        outputs=(
            Output("every_t", "t_0", "whole"),
            Output("every_id", "ids_1", "whole"),
            Output("exchanged", "exchanged", "split", 0),
            Output("sum", "sum", "whole"),
        ),
    )
    return write_plan(plan, folder, {})


def table_batches(steps: int, samples: int = 10) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(1)
    return [
        {"ids": generator.integers(0, 8, samples), "t": generator.normal(size=(samples, 2))}
        for _ in range(steps)
    ]


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
