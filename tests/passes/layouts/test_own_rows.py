"""Rows that updates look up and write by the same ids stay with the ranks that keep them."""

from pathlib import Path

import pytest

from partc.compiler.commands.arguments.parse_update_options import parse_optimizer
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import MESH_STRATEGY_FORMAT, AxisSplit, Strategy
from partc.models.catalogue import build_model
from partc.passes.layouts.layouts import OwnRows
from tests.builders.plans.compiled_steps import Compiled, compile_as_allowed, random_batches, verified
from tests.checks.oracle import Oracle

SIZES = {"vocab": 21, "embedding": 6, "cells": 8, "projection": 6, "samples": 9, "steps": 3}


def trained(optimizer: str, shape: str, mesh: dict[str, int], folder: Path) -> Compiled:
    """Train a language model whose tables are kept by rows, of which 21 do not divide."""
    by = parse_optimizer(optimizer, "0.1", ("lazy=true",) if optimizer.startswith("adam") else (), None)
    forward = build_model("lm", batch=8, dtype="float64", **SIZES)
    step = build_training_graph(forward, loss="loss", optimizer=by)
    rows = {table: {"tensor": AxisSplit(0)} for table in ("embedding", "softmax.weight")}
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh=mesh, variables=rows)
    compiled = compile_as_allowed(step, folder / "out", shape, strategy, "global")
    batches = random_batches(compiled.plan, 2, high=SIZES["vocab"])
    assert Oracle(import_training_graph(step)).first_wrong(compiled, batches[0], 1e-9) is None
    assert verified(compiled, batches).passed
    return compiled


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "adamw"])
@pytest.mark.parametrize(
    ("shape", "mesh"), [("1x2", {"data": 1, "tensor": 2}), ("2x2", {"data": 2, "tensor": 2})]
)
def test_no_rank_is_sent_slots_of_others(
    optimizer: str, shape: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    compiled = trained(optimizer, shape, mesh, tmp_path)

    meanings = compiled.compilation.lowered.meanings.values()
    own = {tensor for tensor, layout in meanings if any(isinstance(p, OwnRows) for p in layout.placements)}
    assert any(tensor.startswith("softmax.weight/update") for tensor in own)
    assert not any("/update" in label for label in compiled.started("all_reduce"))


def test_a_rule_that_puts_rows_together_has_them_summed(tmp_path: Path) -> None:
    compiled = trained("lamb", "1x2", {"data": 1, "tensor": 2}, tmp_path)

    meanings = compiled.compilation.lowered.meanings.values()
    assert not any(isinstance(p, OwnRows) for _, layout in meanings for p in layout.placements)
