"""Memory by kind, held to what plan.json says that ranks keep."""

import json
from math import prod

import numpy as np
import pytest

from partc.compiler.report.cluster.describe_devices import describe_devices
from partc.compiler.report.units import size
from tests.builders.plans.compiled_reports import Compiled, plain


def test_weights_and_slots_are_those_that_a_rank_holds(compiled: Compiled) -> None:
    plan = json.loads((compiled.folder / "plan.json").read_text())
    variables = {variable["name"]: variable for variable in plan["variables"]}
    shared = {piece["value"] for piece in plan["slices"]}

    for rank, needs in zip(plan["ranks"], compiled.compilation.memory, strict=True):
        kept = {"parameter": 0, "slot": 0, "other": 0}
        in_buffers = shared | {piece["value"] for piece in rank["slices"]}
        for piece in (piece for piece in rank["pieces"] if piece["value"] not in in_buffers):
            variable = variables[piece["variable"]]
            lengths = variable["shape"]
            if piece.get("box"):
                lengths = [prod(stop - start for start, stop in axis) for axis in piece["box"]["ranges"]]
            kept[variable["role"]] += prod(lengths) * np.dtype(variable["dtype"]).itemsize
        assert needs.slots_bytes == kept["slot"] + kept["other"]
        assert needs.variables_bytes - needs.slots_bytes == kept["parameter"]


def test_bars_are_to_the_scale_of_the_fullest_rank(compiled: Compiled) -> None:
    compilation = compiled.compilation

    rows = describe_devices(compilation.memory, compilation.timeline, compilation.plan)

    fullest = max(needs.needed_bytes for needs in compilation.memory)
    sums = [sum(part.share for part in row.parts) for row in rows]
    assert max(sums) == pytest.approx(1.0)
    needed = {needs.needed_bytes / fullest for needs in compilation.memory}
    assert all(any(total == pytest.approx(share, rel=0.01) for share in needed) for total in sums)
    for needs in compilation.memory:
        assert plain(size(needs.limit_bytes)) in compiled.text
