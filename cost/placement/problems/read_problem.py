"""Read a placement problem from the JSON of the public dnn-partitioning collection.

    {"maxFPGAs": 6, "maxCPUs": 1, "maxSizePerFPGA": bytes,
     "nodes": [{"id", "name", "supportedOnFpga", "cpuLatency", "fpgaLatency", "isBackwardNode", "colorClass",
                "size"}],
     "edges": [{"sourceId", "destId", "cost"}]}

Numbers are read as written, without rounding. `colorClass` may be absent.
"""

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from partc.cost.placement.problems.problem import BadPlacementProblem, Node, Problem


def read_problem(path: Path) -> Problem:
    """Read one problem; times keep the file's unit. Raises BadPlacementProblem."""
    try:
        record = json.loads(path.read_text(), parse_float=Fraction, parse_constant=_refuse_constant)
    except (OSError, ValueError) as error:
        fix = "give a JSON file of the dnn-partitioning collection"
        raise BadPlacementProblem(f"cannot be read: {error}", at=str(path), fix=fix) from None
    reader = _Reader(str(path))
    return reader.problem(record)


def _refuse_constant(text: str) -> Fraction:
    raise ValueError(f"{text} is no number")


class _Reader:
    def __init__(self, path: str) -> None:
        self.path = path

    def problem(self, record: object) -> Problem:
        entries = [(f"nodes[{i}]", entry) for i, entry in enumerate(self._list(record, "nodes"))]
        places: dict[object, int] = {}
        for at, entry in entries:
            number = self._get(entry, "id", at)
            if not isinstance(number, int) or number in places:
                raise self._error(
                    f"the id {number!r} is no number of its own", at, "give every node its own id"
                )
            places[number] = len(places)
        edges, costs = self._edges(record, places)
        return Problem(
            tuple(self._node(entry, costs.get(i, Fraction(0)), at) for i, (at, entry) in enumerate(entries)),
            edges,
            accelerators=int(self._number(record, "maxFPGAs", "top level")),
            cpus=int(self._number(record, "maxCPUs", "top level")),
            accelerator_memory=self._number(record, "maxSizePerFPGA", "top level"),
        )

    def _edges(
        self, record: object, places: Mapping[object, int]
    ) -> tuple[tuple[tuple[int, int], ...], dict[int, Fraction]]:
        edges: dict[tuple[int, int], None] = {}
        costs: dict[int, Fraction] = {}
        for i, entry in enumerate(self._list(record, "edges")):
            at = f"edges[{i}]"
            ends = [self._get(entry, key, at) for key in ("sourceId", "destId")]
            if missing := [end for end in ends if end not in places]:
                raise self._error(f"no node has the id {missing[0]}", at, "name the id of a node")
            source, target = (places[end] for end in ends)
            cost = self._number(entry, "cost", at)
            if costs.setdefault(source, cost) != cost:
                fix = "give all edges of one node the cost of its output"
                raise self._error("two costs for the output of one node", at, fix)
            edges[source, target] = None
        return tuple(edges), costs

    def _node(self, entry: object, output_cost: Fraction, at: str) -> Node:
        colour = entry.get("colorClass") if isinstance(entry, dict) else None
        if colour is not None and not isinstance(colour, int):
            raise self._error(f"colorClass is {colour!r}", at, "give a whole number, or leave it out")
        supported = str(self._get(entry, "supportedOnFpga", at)) in ("1", "True")
        return Node(
            name=str(self._get(entry, "name", at)),
            cpu_time=self._number(entry, "cpuLatency", at),
            accelerator_time=self._number(entry, "fpgaLatency", at) if supported else None,
            output_cost=output_cost,
            size=self._number(entry, "size", at),
            colour=colour,
            backward=str(self._get(entry, "isBackwardNode", at)) in ("1", "True"),
        )

    def _list(self, record: object, key: str) -> list[Any]:
        value = self._get(record, key, "top level")
        if not isinstance(value, list):
            raise self._error(f"'{key}' is no list", "top level", f"give a list of {key}")
        return value

    def _number(self, record: object, key: str, at: str) -> Fraction:
        value = self._get(record, key, at)
        if isinstance(value, bool) or not isinstance(value, int | Fraction):
            raise self._error(f"'{key}' is {value!r}", at, "give a number")
        return Fraction(value)

    def _get(self, record: object, key: str, at: str) -> Any:  # whatever JSON holds
        if not isinstance(record, dict) or key not in record:
            raise self._error(f"'{key}' is missing", at, f"give '{key}'")
        return record[key]

    def _error(self, what: str, at: str, fix: str) -> BadPlacementProblem:
        return BadPlacementProblem(what, at=f"{self.path}: {at}", fix=fix)
