"""What a reader is told of communications: words and the user's names, never the compiler's own."""

import re
from pathlib import Path

import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.report.describe_messages import MessageNames
from partc.models.catalogue import build_model
from partc.runtime.plan.program import Start
from tests.builders.plans.compiled_reports import Compiled, TextReader, compile_lm
from tests.builders.plans.compiled_steps import compile_step

OWN = re.compile(
    r"\.(?:pull|push|found|own|average|spread|scattered|partial|sent)\b|/gradient/|deterministic"
)


def told(compiled: Compiled) -> list[str]:
    names = MessageNames(compiled.compilation)
    starts = [i for i in compiled.compilation.plan.instructions if isinstance(i, Start)]
    return [names.words(start).what for start in starts]


def test_rows_that_servers_own_are_told_by_their_table(tmp_path: Path) -> None:
    served = compile_lm("cluster-2x2", tmp_path / "out", "ps")

    words = told(served)

    assert "Tell each host’s server which rows of embedding its workers need" in words
    assert "Send the rows of softmax.weight to the hosts that asked for them" in words
    assert "Hand each worker the rows of embedding that it needs" in words
    assert "Send the gradients of embedding’s touched rows to the servers that own them" in words
    assert any(line.startswith("Collect lstm.") and "from the servers" in line for line in words)
    assert not [line for line in words if OWN.search(line)]


def test_ids_and_rows_that_all_workers_exchange_are_told_by_their_table(tmp_path: Path) -> None:
    exchanged = compile_lm("cluster-2x2", tmp_path / "out", "allreduce")

    starts = [i for i in exchanged.compilation.plan.instructions if isinstance(i, Start)]
    gathered = [words for start, words in zip(starts, told(exchanged), strict=True) if "rows" in start.kind]

    tables = {"embedding", "softmax.weight", "softmax.bias"}
    assert len(gathered) > len(tables)
    assert set(gathered) == {
        f"Give every worker the gradients of {table}\u2019s touched rows" for table in tables
    }


def test_nothing_on_the_page_has_a_name_of_the_compilers_own(compiled: Compiled) -> None:
    assert OWN.findall(compiled.text) == []


@pytest.mark.parametrize(
    ("batch", "strategy", "line"),
    [
        (16, "pipeline=2,microbatches=2", "to stage1, micro-batch 2"),
        (None, "pipeline=2,microbatches=2", "to stage1, micro-batch 2"),
        (16, "tensor=2", "along tensor"),
        (16, "fsdp", "Collect the parts of layer0.weight"),
        (None, "one-weird-trick", "on all workers"),
    ],
)
def test_meshes_are_told(batch: int | None, strategy: str, line: str, tmp_path: Path) -> None:
    """Of a symbolic batch, activations go by AllGatherv as touched rows do, and are told as what they are."""
    forward = build_model("mlp", sizes=(16, 32, 8), batch=batch)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))
    sizes = {"batch": 16} if batch is None else {}
    made = compile_step(import_training_graph(step), tmp_path / "out", "1x4", strategy, "global", sizes)
    compiled = Compiled(made.compilation, made.compilation.cluster, made.folder.path)

    assert any(line in words for words in told(compiled)), told(compiled)
    assert not [words for words in told(compiled) if "touched rows" in words], "no gradient is sparse"
    page = (compiled.folder / "report.html").read_text(encoding="utf-8")
    assert OWN.findall(TextReader.read(page)) == []


def test_sums_that_go_by_levels_are_told_so(tmp_path: Path) -> None:
    forward = build_model("mlp", sizes=(512, 512, 8), batch=16)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))
    strategy = "data=4,microbatches=2"

    made = compile_step(import_training_graph(step), tmp_path / "out", "2x2", strategy, "global")

    words = told(Compiled(made.compilation, made.compilation.cluster, made.folder.path))
    sentences = [line for line in words if "layer0.weight" in line]
    what = "gradients of layer0.weight, layer0.bias and 2 more and loss/ReduceMean"
    assert sentences == [f"Sum the {what} over the ranks along data, within hosts first"]
