"""Hand-made plans of least squares: dense variables, all-reduced or on servers."""

from pathlib import Path

import numpy as np

from partc.runtime.plan.boxes import rows_box
from partc.runtime.plan.program import Buffer, Output, Slice, Start, Wait
from partc.runtime.plan.variables import DataInput, PlanVariable, Uniform, VariablePiece
from tests.builders.plans.hand_made_plans import Member, plan_of, rank, run, segment, write_plan

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


UPDATE_AT_RATE = """
update (double[r,2] W, double[r,2] dW, double rate) => (double[r,2] W_next) {
    step = Mul (rate, dW)
    W_next = Sub (W, step)
}
"""
LINEAR_INPUTS = (DataInput("x", "float64", (4, 3), 0), DataInput("y", "float64", (4, 2), 0))
LINEAR_W = PlanVariable("W", "float64", (3, 2), Uniform(-1.0, 1.0, 7), "parameter", method="all_reduce")


def linear_all_reduce(folder: Path, replicas: int, *, has_rate: bool = False) -> Path:
    """Least squares by SGD: the gradient and the loss in one bucket, all-reduced.

    `has_rate`: the learning rate is fed.
    """
    rate = (DataInput("rate", "float64", (), None),) if has_rate else ()
    everybody = tuple(range(replicas))
    ranks = [
        rank(r, ("worker",), r, {"all": everybody}, pieces=(VariablePiece("W", "W"),)) for r in everybody
    ]
    instructions = [
        run("worker", "gradient", ("x", "y", "W"), ("dW", "loss")),
        Start(0, "all_reduce", "all", "worker", "worker", ("bucket",), ("bucket",), label="bucket"),
        Wait(0),
        run("worker", "update", ("W", "dW", *(entry.name for entry in rate)), ("W_next=W",)),
    ]
    plan = plan_of(
        ranks,
        instructions,
        variables=(LINEAR_W,),
        data_inputs=(*LINEAR_INPUTS, *rate),
        buffers=(Buffer("bucket", "float64", 7, ("worker",)),),
        slices=(Slice("dW", "bucket", 0, (3, 2)), Slice("loss", "bucket", 6, ())),
        outputs=(Output("loss", "loss", "whole"),),
    )
    gradient = GRADIENT.replace("SAMPLES", str(4 * replicas))
    update = UPDATE_AT_RATE if has_rate else UPDATE
    return write_plan(plan, folder, {segment("gradient"): gradient, segment("update"): update})


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


def _sharded_ranks(merged: bool) -> list[Member]:
    shards = (
        (
            (VariablePiece("W", "W_owned", rows_box((3, 2), 0, 2)),),
            (Slice("dW_owned", "gradients", 0, (2, 2)),),
        ),
        (
            (VariablePiece("W", "W_owned", rows_box((3, 2), 2, 3)),),
            (Slice("dW_owned", "gradients", 4, (1, 2)),),
        ),
    )
    if merged:
        groups = {"all": (0, 1), "workers": (0, 1)}
        return [
            rank(r, ("worker", "server"), r, groups, pieces=pieces, slices=slices)
            for r, (pieces, slices) in enumerate(shards)
        ]
    everybody = {"all": (0, 1, 2, 3)}
    workers = [rank(r, ("worker",), r, everybody | {"workers": (0, 1)}) for r in (0, 1)]
    servers = [
        rank(r, ("server",), None, everybody, pieces=pieces, slices=slices)
        for r, (pieces, slices) in enumerate(shards, 2)
    ]
    return workers + servers


def _one_server_ranks(merged: bool) -> list[Member]:
    pieces = (VariablePiece("W", "W_owned"),)
    slices = (Slice("dW_owned", "gradients", 0, (3, 2)),)
    if merged:
        groups = {"all": (0, 1), "workers": (0, 1)}
        return [
            rank(0, ("worker", "server"), 0, groups, pieces=pieces, slices=slices),
            rank(1, ("worker",), 1, groups),
        ]
    everybody = {"all": (2, 0, 1)}
    workers = [rank(r, ("worker",), r, everybody | {"workers": (0, 1)}) for r in (0, 1)]
    return [*workers, rank(2, ("server",), None, everybody, pieces=pieces, slices=slices)]


def linear_batches(replicas: int, steps: int) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    return [
        {"x": generator.normal(size=(4 * replicas, 3)), "y": generator.normal(size=(4 * replicas, 2))}
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
