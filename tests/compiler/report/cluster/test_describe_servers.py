from dataclasses import replace
from pathlib import Path

from partc.compiler.report.choices.describe_variables import describe_variables
from partc.compiler.report.cluster.describe_servers import (
    describe_contents,
    describe_copies,
    describe_servers,
)
from partc.cost.assignment.server_assignment import ServerAssignment
from partc.runtime.plan.plan_folder import read_plan_folder
from tests.builders.plans.boxed_plans import LAYOUTS, boxed_momentum
from tests.builders.plans.row_plans import table_on_servers

SOLVED = ServerAssignment(
    objective_bytes=3_000_000,
    bound_bytes=2_900_000,
    status="FEASIBLE",
    deterministic_time=0.5,
    bytes_per_server={"a": 3_000_000, "b": 1_500_000},
    moved_bytes_per_server={"a": 10, "b": 40},
)


def words(text: str) -> str:
    return " ".join(text.split())


def test_shares_are_of_the_fullest_and_of_the_busiest() -> None:
    told = describe_servers(SOLVED)

    assert told is not None
    assert [(s.host, s.stored_share, s.moved_share) for s in told.servers] == [
        ("a", 1.0, 0.25),
        ("b", 0.5, 1.0),
    ]
    assert (words(told.fullest), words(told.objective), told.is_cut_again) == ("3.00 MB", "3.00 MB", False)
    assert words(told.gap) == "3.3 %"


def test_what_was_cut_by_traffic_is_told_apart_from_the_solvers_answer() -> None:
    told = describe_servers(replace(SOLVED, bytes_per_server={"a": 500_000, "b": 4_000_000}))

    assert told is not None
    assert (words(told.fullest), words(told.objective), told.is_cut_again) == ("4.00 MB", "3.00 MB", True)


def test_without_servers_there_is_nothing_to_tell() -> None:
    assert describe_servers(None) is None


def test_parts_that_workers_keep_are_no_servers_and_no_copies(tmp_path: Path) -> None:
    plan = read_plan_folder(boxed_momentum(tmp_path / "out", LAYOUTS["strided"], 2)).plan

    assert words(describe_copies(plan)) == (
        "Every worker keeps its own copy of 1 variable, 8 B together, "
        "and a part of 2 others, 192 B together on rank 0."
    )
    rows = {row.name: row for row in describe_variables(plan, (), {})}
    assert words(rows["w"].where) == "2 parts: ranks 0–3"
    assert rows["w"].where_title == "rank 0, 2: [0:4, 0:3 x 0:1]; rank 1, 3: [0:4, 0:3 x 1:2]"
    assert (rows["count"].where, rows["count"].where_title) == ("every worker", "")


def test_a_server_owns_its_rows(tmp_path: Path) -> None:
    plan = read_plan_folder(table_on_servers(tmp_path / "out", merged=True)).plan

    assert words(describe_contents("alpha", plan, 40).headline) == "server (rank 0): 80 B"
    assert words(describe_copies(plan)) == "No worker keeps a copy of a variable."
