"""Bytes that a rank sends in a step, as the transport counts them, against table 3 of the Parallax paper.

    w parameter bytes, N hosts of one worker, alpha the share of rows that one worker touches

                 the paper, sent and received      partc, per host, sent and received
    dense  MPI   4 w (N-1)/N                       the same: ring AllReduce
    dense  PS    2 w                               4 w (N-1)/N: a host is a server too, and keeps its own N-th
    sparse MPI   2 alpha w (N-1)                   the same: AllGatherv
    sparse PS    2 alpha w                         4 alpha w (N-1)/N, for the same reason

The paper counts a GPU's traffic with servers elsewhere; here every host is worker and server, so what it
serves to others counts as well, and what it serves itself does not. Row ids are counted apart. Table 3
is reconstructed from section 5.3.1, since the text copy lost its formulas.
"""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from partc.compiler.importing.bindings import GradientTensors
from partc.cost.strategy import STRATEGY_FORMAT, Shard, Strategy, Synchronisation
from partc.runtime.in_process import train_in_process
from tests.compiled_steps import compile_step, random_batches
from tests.small_steps import training_of

ROWS, WIDTH = 8_000, 4
W = ROWS * WIDTH * 8

DENSE = f"""
step (double[8,{ROWS}] x, double[8,{WIDTH}] t, double[{ROWS},{WIDTH}] W)
    => (double loss, double[{ROWS},{WIDTH}] W_next)
<double lr = {{0.1}}> {{
    y = MatMul (x, W)
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    xt = Transpose (x)
    dW = MatMul (xt, d)
    s = Mul (dW, lr)
    W_next = Sub (W, s)
}}
"""


def sparse_step(ids: int) -> str:
    return f"""
step (int64[{ids}] ids, double[{ids},{WIDTH}] t, double[{ROWS},{WIDTH}] W)
    => (double loss, double[{ROWS},{WIDTH}] W_next)
<double lr = {{-0.1}}, int64[1] last = {{-1}}> {{
    e = Gather (W, ids)
    d = Sub (e, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    rows = Mul (d, lr)
    positions = Unsqueeze (ids, last)
    W_next = ScatterND <reduction = "add"> (W, positions, rows)
}}
"""


def strategy(method: str, hosts: int) -> Strategy:
    ends = [ROWS * host // hosts for host in range(hosts + 1)]
    shards = tuple(Shard(f"host{h}", ends[h], ends[h + 1]) for h in range(hosts))
    chosen = Synchronisation(method, shards if method == "servers" else ())  # type: ignore[arg-type]
    return Strategy(STRATEGY_FORMAT, "global", {"W": chosen})


def sent_bytes(supplied: dict[str, int], hosts: int) -> float:
    """Return what a rank sends, from what it supplied: collectives pass pieces on (Patarasuk and Yuan)."""
    n = hosts
    times = {"all_reduce": 2 * (n - 1) / n, "reduce_scatter": (n - 1) / n, "all_gather": n - 1}
    times |= {"all_gather_rows": n - 1, "all_to_all_rows": 1}
    return sum(count * times[kind] for kind, count in supplied.items() if count)


def exchanged(text: str, method: str, hosts: int, ids: np.ndarray | None, folder: Path) -> list[float]:
    """Train a step; return what each rank sent and received together: all send alike."""
    axes = {"ids": 0, "t": 0} if ids is not None else {"x": 0, "t": 0}
    gradients = {
        "W": GradientTensors(ids="ids", rows="rows") if ids is not None else GradientTensors(dense="dW")
    }
    training = training_of(text, axes, gradients)
    done = compile_step(training, folder / "out", f"{hosts}x1", strategy(method, hosts), "global")
    batch = random_batches(done.plan, 1)[0]
    if ids is not None:
        batch["ids"] = ids
    supplied = train_in_process(done.folder, [batch]).payload_bytes
    return [2 * sent_bytes(kinds, hosts) for kinds in supplied.values()]


@pytest.mark.parametrize("hosts", [2, 4, 8])
@pytest.mark.parametrize("method", ["all_reduce", "servers"])
def test_a_dense_parameter(method: str, hosts: int, tmp_path: Path) -> None:
    found = exchanged(DENSE, method, hosts, None, tmp_path)

    assert found == pytest.approx([4 * W * (hosts - 1) / hosts] * hosts, rel=0.01)


ALPHAS = (0.001, 0.01, 0.1, 1.0)
CASES = list(product(("all_gather", "servers"), (2, 4, 8), ALPHAS))


def check_sparse(method: str, hosts: int, alpha: float, folder: Path) -> None:
    each = round(alpha * ROWS)
    # Spread evenly over the table, and so over its owners; no id twice on a worker.
    ids = np.concatenate([np.arange(each) * ROWS // each] * hosts)

    found = exchanged(sparse_step(len(ids)), method, hosts, ids, folder)

    touched = each / ROWS * W
    formula = {"all_gather": 2 * touched * (hosts - 1), "servers": 4 * touched * (hosts - 1) / hosts}
    small = 4 * 8  # the loss, summed by all
    assert found == pytest.approx([formula[method]] * hosts, rel=0.01, abs=small)


@pytest.mark.parametrize(("method", "hosts", "alpha"), CASES[::3])
def test_a_sparse_parameter(method: str, hosts: int, alpha: float, tmp_path: Path) -> None:
    check_sparse(method, hosts, alpha, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("method", "hosts", "alpha"), CASES)
def test_a_sparse_parameter_in_every_case(method: str, hosts: int, alpha: float, tmp_path: Path) -> None:
    check_sparse(method, hosts, alpha, tmp_path)
