from dataclasses import replace

from partc.compiler.report.describe_servers import describe_servers
from partc.cost.assignment.server_assignment import ServerAssignment

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
