"""Two plans with their pages: a small network split both ways, and a language model with servers."""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx
import pytest

from partc.compiler.compilation import Compilation
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adam
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.report.packed_json import unpacked
from partc.models.catalogue import build_model
from partc.runtime.plan.program import Plan, Run, instructions_of
from tests.builders.plans.compiled_reports import compile_lm
from tests.builders.plans.compiled_steps import compile_step

SIZES = (64, 128, 128, 10)
BATCH = 16


@dataclass(frozen=True)
class Page:
    """A compilation, the user's file that it came from, and the columns of its page."""

    compilation: Compilation
    model: onnx.ModelProto
    folder: Path
    columns: dict[str, Any]

    @property
    def plan(self) -> Plan:
        return self.compilation.plan

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    def node(self, name: str) -> dict[str, Any]:
        """Return a node's facts by the names of their columns; `ranks` are who computes it."""
        nodes = self.columns["nodes"]
        at = nodes["name"].index(name)
        facts = {key: values[at] for key, values in nodes.items() if len(values) == len(nodes["name"])}
        words, rows, columns, together, runs = nodes["splits"][facts["split"]]
        ranks = [
            first + step * n
            for first, step, count in zip(*[iter(runs)] * 3, strict=True)
            for n in range(count)
        ]
        return facts | {"words": words, "grid": (rows, columns, together), "ranks": ranks}

    @cached_property
    def copies(self) -> dict[str, set[str]]:
        """Return segment -> the names of its nodes before the first @, as its file has them."""
        paths = {i.segment for i in self.plan.instructions if isinstance(i, Run)}
        return {
            path: {
                n.name.partition("@")[0] for n in onnx.load(self.folder / path).graph.node if "@" in n.name
            }
            for path in paths
        }

    @cached_property
    def runs(self) -> dict[int, set[str]]:
        """Return rank -> the segments that its program runs."""
        return {
            rank.rank: {i.segment for i in instructions_of(self.plan, rank) if isinstance(i, Run)}
            for rank in self.plan.ranks
        }

    def ranks_that_run(self, name: str) -> set[int]:
        """Return the ranks whose programs run a segment with a copy of a node."""
        return {rank for rank, paths in self.runs.items() if any(name in self.copies[path] for path in paths)}


def page_of(compilation: Compilation, model: onnx.ModelProto, folder: Path) -> Page:
    text = (folder / "report.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="graph-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return Page(compilation, model, folder, unpacked(json.loads(found[1])))


@pytest.fixture(scope="session")
def mesh_page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    forward = build_model("mlp", sizes=SIZES, batch=BATCH)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Adam())
    out = tmp_path_factory.mktemp("mesh") / "out"
    compiled = compile_step(import_training_graph(step), out, "2x2", "data=2,tensor=2", "global")
    return page_of(compiled.compilation, step, out)


@pytest.fixture(scope="session")
def server_page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    out = tmp_path_factory.mktemp("servers") / "out"
    compiled = compile_lm("cluster-2x2", out, "hybrid")
    return page_of(compiled.compilation, onnx.load(out / "train.onnx"), out)
