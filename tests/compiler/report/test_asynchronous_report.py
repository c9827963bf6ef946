"""The report of an asynchronous plan speaks of one worker's session with all servers."""

from pathlib import Path

from partc.compiler.importing.import_training import import_training_graph
from tests.builders.plans.compiled_reports import TextReader
from tests.builders.plans.session_plans import compile_sessions
from tests.builders.plans.wide_mlp import wide_mlp


def test_ways_that_need_a_step_of_all_workers_are_not_priced(tmp_path: Path) -> None:
    compile_sessions(import_training_graph(wide_mlp(8)), tmp_path / "out")

    text = TextReader.read((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))

    assert "Every variable lives on servers" in text
    assert "would be quicker" not in text
    assert "After every step all workers must agree" not in text
    assert "Why, in words" not in text
    assert "Training on all ranks equals" not in text and "each computes with variables that others" in text
    assert "as its mesh says" not in text and "pulled and pushed by each worker" in text
    assert "1 worker, 2 servers in one session" in text.replace("\u00a0", " ")
