import json
from fractions import Fraction
from pathlib import Path

import pytest

from partc.cost.placement.problems.problem import BadPlacementProblem, Problem
from partc.cost.placement.problems.read_problem import read_problem


def record() -> dict:
    node = {"supportedOnFpga": 1, "cpuLatency": 10, "fpgaLatency": 0.1, "isBackwardNode": False, "size": 5.0}
    return {
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "maxSizePerFPGA": 100.0,
        "nodes": [{"id": 4, "name": "a", "colorClass": 3, **node}, {"id": 2, "name": "b", **node}],
        "edges": [{"sourceId": 4, "destId": 2, "cost": 0.3}],
    }


def read(tmp_path: Path, value: object) -> Problem:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(value))
    return read_problem(path)


def test_numbers_are_read_as_written(tmp_path: Path) -> None:
    problem = read(tmp_path, record())

    assert problem.nodes[0].accelerator_time == Fraction(1, 10)
    assert [node.output_cost for node in problem.nodes] == [Fraction(3, 10), 0]
    assert [node.colour for node in problem.nodes] == [3, None]
    assert problem.edges == ((0, 1),)
    assert (problem.accelerators, problem.cpus, problem.accelerator_memory) == (2, 1, 100)


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (("nodes", 0, "cpuLatency"), "fast", "nodes[0]"),
        (("nodes", 1, "id"), 4, "nodes[1]"),
        (("nodes", 1, "colorClass"), "red", "nodes[1]"),
        (("edges", 0, "destId"), 9, "edges[0]"),
        (("edges",), 3, "top level"),
        (("maxFPGAs",), None, "top level"),
        (("nodes", 0, "size"), -1, "node 'a'"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, path: tuple, value: object, where: str) -> None:
    wrong = record()
    target = wrong
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value

    with pytest.raises(BadPlacementProblem) as error:
        read(tmp_path, wrong)
    assert where in error.value.at


def test_two_costs_for_one_output_are_refused(tmp_path: Path) -> None:
    wrong = record()
    wrong["nodes"].append({**wrong["nodes"][1], "id": 5})
    wrong["edges"].append({"sourceId": 4, "destId": 5, "cost": 0.4})

    with pytest.raises(BadPlacementProblem, match="two costs"):
        read(tmp_path, wrong)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text('{"nodes": NaN')

    with pytest.raises(BadPlacementProblem, match="cannot be read"):
        read_problem(path)
