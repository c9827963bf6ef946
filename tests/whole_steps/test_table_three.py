"""Bytes that a rank sends and receives in a step, as the transport counts them, against table 3 of the
Parallax paper.

    w parameter bytes, N hosts of one worker, alpha the share of rows that one worker touches

                 what one worker exchanges                             table 3            partc
    dense  MPI   ring AllReduce: in 2 (N-1) steps, w/N out and in      4 w (N-1)/N        the same
    dense  PS    w of parameters in, w of gradients out                2 w                so, server elsewhere
                 the same, and as a server of w/N to N-1 others        -                  4 w (N-1)/N
    sparse MPI   AllGatherv: alpha w out to, and in from, N-1 others   2 alpha w (N-1)    the same
    sparse PS    alpha w of rows in, alpha w of their gradients out    2 alpha w          so, server elsewhere
                 the same, and as a server of an N-th of the rows      -                  4 alpha w (N-1)/N

Table 3 counts a worker's traffic with servers elsewhere. Where every host is worker and server of an even
share, as the paper runs it, a worker keeps its own N-th local, 2 w (N-1)/N, and as a server answers the
N-1 others, 2 w (N-1)/N more. So partc's two columns of PS are two places of the servers, and both are held
here. Table 3 is reconstructed from section 5.3.1, since the text copy lost its formulas.

Row ids (8 bytes a row touched) are counted apart: AllGatherv sends each once to all others; servers get
them twice, to pull and to push.
"""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from partc.compiler.importing.bindings import GradientTensors
from partc.cost.strategy import STRATEGY_FORMAT, Method, Shard, Strategy, Synchronisation
from partc.runtime.execution.in_process import train_in_process
from partc.runtime.transports.exchanged import Exchanged
from tests.builders.graphs.small_steps import training_of
from tests.builders.plans.compiled_steps import compile_step, random_batches
from tests.sampling import sampled

ROWS, WIDTH = 8_000, 4
W = ROWS * WIDTH * 8
ID_BYTES = LOSS_BYTES = 8

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


def synchronised(method: Method, shards: int, hosts: int) -> Strategy:
    """Return the strategy that gives W this method, its rows dealt evenly to the first `shards` hosts."""
    ends = [ROWS * host // shards for host in range(shards + 1)] if shards else []
    dealt = tuple(Shard(f"host{h}", ends[h], ends[h + 1]) for h in range(shards))
    return Strategy(STRATEGY_FORMAT, "global", {"W": Synchronisation(method, dealt)})


def exchanged(
    text: str, strategy: Strategy, hosts: int, ids: np.ndarray | None, folder: Path
) -> list[Exchanged]:
    """Train a step; return what each rank sent and received, without the loss that all of them sum."""
    axes = {"ids": 0, "t": 0} if ids is not None else {"x": 0, "t": 0}
    gradients = {
        "W": GradientTensors(ids="ids", rows="rows") if ids is not None else GradientTensors(dense="dW")
    }
    done = compile_step(training_of(text, axes, gradients), folder / "out", f"{hosts}x1", strategy, "global")
    batch = random_batches(done.plan, 1)[0]
    if ids is not None:
        batch["ids"] = ids
    counted = train_in_process(done.folder, [batch]).exchanged
    for rank in counted.values():
        rank.values_sent -= LOSS_BYTES * (hosts - 1) * 2 // hosts
        rank.values_received -= LOSS_BYTES * (hosts - 1) * 2 // hosts
    return [counted[rank] for rank in sorted(counted)]


EVENLY, ONE = "servers on all hosts", "a server elsewhere"
HOSTS = (2, 4, 8)
ALPHAS = (0.001, 0.01, 0.1, 1.0)


# ---------------------------------------------------------------- dense


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize(("method", "servers"), [("all_reduce", None), ("servers", EVENLY)])
def test_a_dense_parameter(method: Method, servers: str | None, hosts: int, tmp_path: Path) -> None:
    strategy = synchronised(method, hosts if servers else 0, hosts)

    found = exchanged(DENSE, strategy, hosts, None, tmp_path)

    assert [rank.values for rank in found] == pytest.approx([4 * W * (hosts - 1) / hosts] * hosts, rel=0.01)
    assert all(rank.ids == 0 for rank in found)


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_dense_parameter_on_a_server_elsewhere(hosts: int, tmp_path: Path) -> None:
    server, *workers = exchanged(DENSE, synchronised("servers", 1, hosts), hosts, None, tmp_path)

    assert [worker.values for worker in workers] == pytest.approx([2 * W] * (hosts - 1), rel=0.01)
    assert server.values == sum(worker.values for worker in workers)


# ---------------------------------------------------------------- sparse


SPARSE = (("all_gather", None), ("servers", EVENLY), ("servers", ONE))
CASES = [(*way, hosts, alpha) for way, hosts, alpha in product(SPARSE, HOSTS, ALPHAS)]


@pytest.mark.parametrize(("method", "servers", "hosts", "alpha"), sampled(CASES, range(0, len(CASES), 5)))
def test_a_sparse_parameter(
    method: Method, servers: str | None, hosts: int, alpha: float, tmp_path: Path
) -> None:
    each = round(alpha * ROWS)
    # Spread evenly over the table, and so over its owners; no id twice on a worker.
    ids = np.concatenate([np.arange(each) * ROWS // each] * hosts)
    shards = {None: 0, EVENLY: hosts, ONE: 1}[servers]

    found = exchanged(sparse_step(len(ids)), synchronised(method, shards, hosts), hosts, ids, tmp_path)

    times = {None: 2 * (hosts - 1), EVENLY: 4 * (hosts - 1) / hosts, ONE: 2}[servers]
    if servers == ONE:
        server, *found = found
        assert server.values == sum(worker.values for worker in found)
    assert [rank.values for rank in found] == pytest.approx([times * alpha * W] * len(found), rel=0.01)
    assert [rank.ids for rank in found] == pytest.approx([times * each * ID_BYTES] * len(found), rel=0.01)
