"""Data that makes a loss no finite number: named with its place, whoever reads it, and on whichever rank."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from partc.compiler.verification.verify import launch_in_process, verify
from partc.runtime.data.feeds import Source, open_source
from partc.runtime.data.not_finite import first_not_finite, with_cause
from partc.runtime.errors import Diverged
from partc.runtime.jobs.runner import Runner
from partc.runtime.plan.program import Plan
from tests.builders.plans.compiled_steps import Compiled, compile_step, import_text, random_batches
from tests.runtime.data.test_feeds import save, two_replicas
from tests.sampling import sampled

STEP = """
step (float[8,4] x, float[4,3] W) => (float loss, float[4,3] W_next) <float rate = {0.01}> {
    y = MatMul (x, W)
    sq = Mul (y, y)
    loss = ReduceMean <keepdims = 0> (sq)
    xt = Transpose <perm = [1, 0]> (x)
    scaled = Mul (y, rate)
    dW = MatMul (xt, scaled)
    W_next = Sub (W, dW)
}
"""
FUNCTION = """
import numpy as np
def batches():
    x = np.ones((32, 4), np.float32)
    yield {"x": x.copy()}
    x[9, 2] = np.inf
    yield {"x": x}
def shards(num_shards, shard_id):
    x = np.ones((8, 4), np.float32)
    yield {"x": x.copy()}
    x[1, 2] = np.inf if shard_id == 1 else 1
    yield {"x": x}
"""


def place(source: Source, plan: Plan, step: int, replica: int | None) -> str:
    rank = None if replica is None else plan.ranks[replica]
    fed = source.total(step) if rank is None else source.share(rank, step)
    found = first_not_finite(plan, fed)
    return "" if found is None else source.place(rank, step, *found)


@pytest.mark.parametrize("replica", [None, 1])
def test_an_element_is_named_where_it_lies_in_the_file(tmp_path: Path, replica: int | None) -> None:
    x = np.ones((20, 3), np.float32)
    x[13, 2] = np.nan  # the second step takes samples 8 to 15, four a replica
    plan = two_replicas()
    source = open_source(save(tmp_path / "data.npz", x=x), plan)

    assert place(source, plan, 0, replica) == ""
    assert place(source, plan, 1, replica) == f"{tmp_path / 'data.npz'}: array 'x', element [13, 2]"
    assert place(source, plan, 1, 0) == ""


def test_what_all_samples_share_is_named_too(tmp_path: Path) -> None:
    plan = two_replicas()
    source = open_source(save(tmp_path / "data.npz", lr=np.array([1, np.inf], np.float32)), plan)

    assert place(source, plan, 3, 1).endswith("array 'lr', element [1]")


def test_an_error_without_such_data_stays_as_it_is() -> None:
    error = Diverged("the loss is nan", at="rank 0", fix="lower the rate")

    assert with_cause(error, two_replicas(), {"x": np.ones((4, 3))}, lambda *_: "") is error


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "broken_data.py").write_text(FUNCTION)
    x = np.ones((64, 4), np.float32)
    x[41, 2] = np.nan
    np.savez(folder / "data.npz", x=x)
    return compile_step(import_text(STEP), folder / "out", "2x2", "allreduce", "per-replica")


def _train(compiled: Compiled, data: str) -> None:
    Runner(compiled.folder).train(data, 2)


def _verify(compiled: Compiled, data: str) -> None:
    verify(compiled.folder, steps=2, data=data, launcher=launch_in_process)


SAID = (
    ("data.npz", "data.npz: array 'x', element [41, 2]"),
    ("broken_data:batches", "batch of step 2: array 'x', element [9, 2]"),
    ("broken_data:shards", "element ["),
)


# Training starts daemons: of data that all ranks read alike, one kind is enough.
@pytest.mark.parametrize(
    ("data", "expected", "use"),
    sampled([(*said, use) for use, said in product((_train, _verify), SAID)], (0, 2, 3, 4, 5)),
)
def test_run_and_verify_name_the_data(
    compiled: Compiled,
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[Compiled, str], None],
    data: str,
    expected: str,
) -> None:
    monkeypatch.chdir(compiled.folder.path.parent)
    monkeypatch.syspath_prepend(compiled.folder.path.parent)

    with pytest.raises(Diverged) as error:
        use(compiled, data)

    assert "2: the data holds" in error.value.what
    assert expected in error.value.at
    assert "correct that data" in error.value.fix


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_training_that_diverges_on_both_sides_is_not_told_to_differ(compiled: Compiled) -> None:
    batches = random_batches(compiled.plan, 2)
    batches[1]["x"] *= np.float32(1e38)  # finite, and its squares are not

    with pytest.raises(Diverged, match="on all ranks and on one device alike") as error:
        verify(compiled.folder, steps=2, data=batches, launcher=launch_in_process)

    assert "give --steps 1" in error.value.fix
    assert "the data holds" not in error.value.what
