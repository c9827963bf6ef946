"""Hand-made plans whose ranks keep boxes of a variable, several ranks a replica.

One step of momentum is elementwise in w and v, so that a rank can make the part it keeps of them without the
others of its replica; they meet for the loss alone, and equal boxes of different replicas for the gradient.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from partc.compiler.importing.bindings import GradientTensors
from partc.runtime.data.initial import InitialValues
from partc.runtime.plan.boxes import rows_box
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Output, Start, Wait
from partc.runtime.plan.variables import (
    Box,
    Constant,
    DataInput,
    Normal,
    PlanVariable,
    Uniform,
    VariablePiece,
)
from tests.builders.graphs.small_steps import training_of
from tests.builders.plans.hand_made_plans import Member, plan_of, rank, run, segment, write_plan
from tests.builders.plans.random_boxes import indices

SHAPE = (4, 6)
SAMPLES = 3  # of a replica
STEP = """
step (double[SAMPLES,4,6] x, double[4,6] w, double[4,6] v, int64 count)
    => (double[SAMPLES] distances, double loss, double[4,6] w_next, double[4,6] v_next, int64 count_next) {
    first = Constant <value_ints = [0]> ()
    behind = Constant <value_ints = [1, 2]> ()
    momentum = Constant <value = double {0.9}> ()
    rate = Constant <value = double {0.1}> ()
    one = Constant <value = int64 {1}> ()
    d = Sub (w, x)
    squared = Mul (d, d)
    distances = ReduceSum <keepdims = 0> (squared, behind)
    loss = ReduceMean <keepdims = 0> (distances)
    dw = ReduceMean <keepdims = 0> (d, first)
    kept = Mul (momentum, v)
    v_next = Add (kept, dw)
    move = Mul (rate, v_next)
    w_next = Sub (w, move)
    count_next = Add (count, one)
}
"""
GRADIENT = """
gradient (double[SAMPLES,4,6] x, int64[r] rows, int64[c] columns, double[r,c] w)
    => (double[SAMPLES] own_distances, double[r,c] dw) {
    first = Constant <value_ints = [0]> ()
    behind = Constant <value_ints = [1, 2]> ()
    replicas = Constant <value = double {REPLICAS}> ()
    x_rows = Gather <axis = 1> (x, rows)
    x_own = Gather <axis = 2> (x_rows, columns)
    d = Sub (w, x_own)
    squared = Mul (d, d)
    own_distances = ReduceSum <keepdims = 0> (squared, behind)
    mean = ReduceMean <keepdims = 0> (d, first)
    dw = Div (mean, replicas)
}
"""
LOSS = """
loss (double[SAMPLES] distances) => (double loss) { loss = ReduceMean <keepdims = 0> (distances) }
"""
UPDATE = """
update (double[r,c] w, double[r,c] v, double[r,c] dw, int64 count)
    => (double[r,c] w_next, double[r,c] v_next, int64 count_next) {
    momentum = Constant <value = double {0.9}> ()
    rate = Constant <value = double {0.1}> ()
    one = Constant <value = int64 {1}> ()
    kept = Mul (momentum, v)
    v_next = Add (kept, dw)
    move = Mul (rate, v_next)
    w_next = Sub (w, move)
    count_next = Add (count, one)
}
"""
VARIABLES = (
    PlanVariable("w", "float64", SHAPE, Uniform(-1.0, 1.0, 7), "parameter"),
    PlanVariable("v", "float64", SHAPE, Normal(0.0, 0.1, 8), "slot", "w"),
    PlanVariable("count", "int64", (), Constant(0.0), "other"),
)

FUSED = ((4,), (3, 2))


def columns(start: int, stop: int) -> Box:
    """Return some columns of w."""
    return Box(((4,), (6,)), (((0, 4),), ((start, stop),)))


def strided(start: int, stop: int) -> Box:
    """Return columns of each of three parts of w, as of queries, keys and values."""
    return Box(FUSED, (((0, 4),), ((0, 3), (start, stop))))


def heads(rows: tuple[int, int], start: int, stop: int) -> Box:
    """Return some rows of some of the three parts."""
    return Box(FUSED, ((rows,), ((start, stop), (0, 2))))


# Name -> what each rank of a replica keeps.
LAYOUTS: dict[str, tuple[Box | None, ...]] = {
    "whole": (None,),
    "rows": (rows_box(SHAPE, 0, 1), rows_box(SHAPE, 1, 4)),
    "columns": (columns(0, 5), columns(5, 6)),
    "strided": (strided(0, 1), strided(1, 2)),
    "grid": (heads((0, 3), 0, 2), heads((0, 3), 2, 3), heads((3, 4), 0, 3)),
    "empty": (columns(0, 0), columns(0, 6)),
}


def boxed_momentum(folder: Path, kept: Sequence[Box | None], replicas: int = 1) -> Path:
    """Momentum on w and v, each replica's ranks with these boxes of them."""
    size = len(kept)
    ranks = [
        _worker(replica * size + k, replica, k, kept, replicas)
        for replica in range(replicas)
        for k in range(size)
    ]
    instructions = [
        run("worker", "gradient", ("x", "rows", "columns", "w"), ("own_distances", "dw")),
        Start(0, "all_reduce", "replica", "worker", "worker", ("own_distances",), ("distances",)),
        Start(1, "all_reduce", "copies", "worker", "worker", ("dw",), ("whole_dw",)),
        Wait(0),
        run("worker", "loss", ("distances",), ("loss",)),
        Wait(1),
        run(
            "worker",
            "update",
            ("w", "v", "dw=whole_dw", "count"),
            ("w_next=w", "v_next=v", "count_next=count"),
        ),
    ]
    plan = plan_of(
        ranks,
        instructions,
        variables=VARIABLES,
        data_inputs=(DataInput("x", "float64", (SAMPLES, *SHAPE), 0),),
        outputs=(Output("loss", "loss", "per_replica"), Output("distances", "distances", "split", 0)),
    )
    texts = {"gradient": GRADIENT, "loss": LOSS, "update": UPDATE}
    segments = {segment(name): _sized(text, replicas) for name, text in texts.items()}
    source = training_of(_sized(STEP, replicas), {"x": 0}, {"w": GradientTensors(dense="dw")}).source
    return write_plan(plan, folder, segments, source)


def _sized(text: str, replicas: int) -> str:
    return text.replace("SAMPLES", str(SAMPLES)).replace("REPLICAS", str(replicas))


def _worker(number: int, replica: int, place: int, kept: Sequence[Box | None], replicas: int) -> Member:
    size = len(kept)
    box = kept[place]
    rows, own_columns = indices(box) if box is not None else (np.arange(4), np.arange(6))
    groups = {
        "replica": tuple(range(replica * size, (replica + 1) * size)),
        "copies": tuple(other * size + place for other in range(replicas)),
    }
    return rank(
        number,
        ("worker",),
        replica,
        groups,
        pieces=(VariablePiece("w", "w", box), VariablePiece("v", "v", box), VariablePiece("count", "count")),
        constants={"rows": tuple(rows.tolist()), "columns": tuple(own_columns.tolist())},
    )


def momentum_batches(replicas: int, steps: int) -> list[dict[str, np.ndarray]]:
    """Return total batches."""
    rng = np.random.default_rng(3)
    return [{"x": rng.normal(size=(SAMPLES * replicas, *SHAPE))} for _ in range(steps)]


def momentum_trained(folder: Path, batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Train as one device would, from the plan's first values."""
    values = InitialValues(read_plan_folder(folder))
    w, v = values.part("w"), values.part("v")
    for batch in batches:
        v = 0.9 * v + (w - batch["x"]).mean(axis=0)
        w = w - 0.1 * v
    return {"w": w, "v": v, "count": np.array(len(batches))}


def momentum_losses(folder: Path, batches: list[dict[str, np.ndarray]], replicas: int) -> np.ndarray:
    """Return float64[steps, replicas]: each replica's loss before each step."""
    losses = []
    for step, batch in enumerate(batches):
        w = momentum_trained(folder, batches[:step])["w"]
        distances = ((w - batch["x"]) ** 2).sum(axis=(1, 2))
        losses.append(distances.reshape(replicas, -1).mean(axis=1))
    return np.array(losses)
