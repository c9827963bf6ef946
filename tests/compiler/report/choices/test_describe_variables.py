"""What is equal is told once."""

from pathlib import Path

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Momentum
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.report.choices.describe_variables import (
    describe_variables,
    group_reasons,
    priced_as_kept,
)
from partc.compiler.report.cluster.describe_servers import describe_copies
from partc.models.catalogue import build_model
from tests.builders.plans.compiled_steps import compile_step


def test_equal_layers_share_a_line_and_reasons_are_told_once(tmp_path: Path) -> None:
    forward = build_model("mlp", sizes=(32, 32, 32, 32, 32, 4), batch=8)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))
    compilation = compile_step(import_training_graph(step), tmp_path / "out", "2x2", "auto").compilation
    plan, choices = compilation.plan, compilation.costs.choices
    facts = {fact.name: fact for fact in compilation.facts}

    rows = describe_variables(plan, choices, facts)
    reasons = group_reasons(choices)

    assert (rows[0].name, rows[0].alike) == (
        "layer0.weight",
        ("layer1.weight", "layer2.weight", "layer3.weight"),
    )
    assert {name for row in rows for name in (row.name, *row.alike)} == {v.name for v in plan.variables}
    assert len(rows) < len(plan.variables)
    assert {name for group in reasons for name in (group.name, *group.alike)} == {
        choice.variable for choice in choices
    }
    assert len(reasons) <= 2
    assert reasons[0].reason == next(c.reason for c in choices if c.variable == reasons[0].name)


def test_variables_of_a_stage_are_kept_by_its_ranks(tmp_path: Path) -> None:
    forward = build_model("mlp", sizes=(256, 512, 512, 256), batch=16)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))
    strategy = "pipeline=2,data=2,microbatches=2"
    compilation = compile_step(
        import_training_graph(step), tmp_path / "out", "2x2", strategy, "global"
    ).compilation

    rows = describe_variables(compilation.plan, compilation.costs.choices, {})

    holders = {
        name: {
            rank.rank for rank in compilation.plan.ranks for piece in rank.pieces if piece.variable == name
        }
        for name in ("layer0.weight", "layer2.weight")
    }
    assert list(holders.values()) == [{0, 1}, {2, 3}]
    told = {name: row.where for row in rows for name in (row.name, *row.alike)}
    assert (told["layer0.weight"], told["layer2.weight"]) == ("ranks 0–1", "ranks 2–3")
    assert all(row.times == () for row in rows)  # a price of the whole among four is not of two ranks
    assert group_reasons(priced_as_kept(compilation.plan, compilation.costs.choices)) == ()
    assert describe_copies(compilation.plan).startswith("Workers keep copies of ")
