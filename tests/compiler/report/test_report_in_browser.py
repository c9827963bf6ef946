"""The page in a real browser: nothing overflows, nothing is too small or too pale, no script fails."""

from pathlib import Path

import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.models.catalogue import build_model
from tests.builders.plans.compiled_reports import Compiled
from tests.builders.plans.compiled_steps import compile_step
from tests.checks.browser import Browser
from tests.checks.page_audit import NOTHING_WRONG, audit

LOOKS = [(1400, False), (1400, True)]


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_nothing_is_wrong_with_the_page(compiled: Compiled, browser: Browser, width: int, dark: bool) -> None:
    with browser.open(compiled.folder / "report.html", width, dark=dark) as page:
        assert audit(page) == NOTHING_WRONG
        assert page.errors == []


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_nothing_is_wrong_with_operators_on_many_devices(
    browser: Browser, width: int, dark: bool, tmp_path: Path
) -> None:
    forward = build_model("mlp", sizes=(16, 32, 32), batch=16)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))
    devices = tuple(f"host{host}/cpu{cpu}" for host in range(4) for cpu in range(4))
    layers = [node.name for node in forward.graph.node if node.op_type == "MatMul"]
    splits = {"batch": 2, "out:1": 8}, {"batch": 8, "out:1": 2}
    ops = tuple(OpConfig(*entry, devices=devices) for entry in zip(layers, splits, strict=True))
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", {}, ops=ops)
    compiled = compile_step(import_training_graph(step), tmp_path / "out", "4x4", strategy, "global")

    with browser.open(compiled.folder.path / "report.html", width, dark=dark) as page:
        assert page.evaluate("!!document.querySelector('section#operators')")
        assert audit(page) == NOTHING_WRONG
        assert page.errors == []
