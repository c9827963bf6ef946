"""Segments' files say what they are: names, documentation, types of what is passed on, sources."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import partc
from partc.compiler.api import compile_step as compile_model
from partc.compiler.options import Options
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder
from partc.runtime.plan.program import Run
from tests.builders.graphs.foreign_steps import ADAM, CLIPPED, TABLE
from tests.builders.plans.compiled_steps import cluster_of, compile_step, import_text

NAME = re.compile(r"\d{2,}-(worker|server|stage\d+|mesh\d+)(-[a-z]+)+")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> PlanFolder:
    """Return a plan whose segments run for each micro-batch, and on stages."""
    forward = partc.build_model("mlp", sizes=(6, 8, 3), batch=8)
    model = partc.build_training_graph(forward, loss="softmax_cross_entropy", optimizer=partc.SGD(0.5))
    out = tmp_path_factory.mktemp("pipeline") / "out"
    options = Options(strategy="pipeline=2,data=2,microbatches=2", batch="global")
    compile_model(model, cluster_of("2x2"), out, options)
    return read_plan_folder(out)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> PlanFolder:
    out = tmp_path_factory.mktemp("servers") / "out"
    return compile_step(import_text(TABLE), out, "2x2", "ps").folder


def segments_of(folder: PlanFolder) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield what the plan runs, in the order of its first run, reloaded and checked."""
    runs = dict.fromkeys(i.segment for i in folder.plan.instructions if isinstance(i, Run))
    assert {f"segments/{path.name}" for path in (folder.path / "segments").iterdir()} == set(runs)
    for name in runs:
        model = onnx.load(folder.path / name)
        onnx.checker.check_model(model, full_check=True)
        yield Path(name).stem, model


def metadata(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


@pytest.mark.parametrize("plan", ["pipeline", "servers"])
def test_names_count_in_order_and_are_everywhere_the_same(plan: str, request: pytest.FixtureRequest) -> None:
    folder: PlanFolder = request.getfixturevalue(plan)
    found = list(segments_of(folder))

    assert [int(name.partition("-")[0]) for name, _ in found] == list(range(1, len(found) + 1))
    for name, model in found:
        assert NAME.fullmatch(name), name
        assert model.graph.name == metadata(model)["partc.segment"] == name
        assert (model.producer_name, model.producer_version) == ("partc", partc.__version__)
        assert model.graph.doc_string and model.doc_string


def test_phases_are_told_and_ranks_are_those_that_run_it(pipeline: PlanFolder, servers: PlanFolder) -> None:
    names = [name for name, _ in segments_of(pipeline)]
    assert names[0].startswith("01-stage0-forward")
    assert any(name.endswith("stage0-update") for name in names)
    assert [n for n in names if n.endswith("-first-microbatch")] and [
        n for n in names if n.endswith("-later-microbatches")
    ]
    assert any(name.endswith("server-sum-update") for name, _ in segments_of(servers))
    for folder in (pipeline, servers):
        site_of = {i.segment: i.site for i in folder.plan.instructions if isinstance(i, Run)}
        for name, model in segments_of(folder):
            site = site_of[f"segments/{name}.onnx"]
            ranks = [rank.rank for rank in folder.plan.ranks if site in rank.sites]
            assert metadata(model)["partc.mesh"] == site
            assert _numbers(metadata(model)["partc.ranks"]) == ranks


def _numbers(text: str) -> list[int]:
    ends = [part.split("-") for part in text.split(",")]
    return [number for first, *last in ends for number in range(int(first), int((last or [first])[0]) + 1)]


def test_clipping_is_post_aggregation(tmp_path: Path) -> None:
    folder = compile_step(import_text(CLIPPED), tmp_path / "out", "2x2", "allreduce").folder

    assert any("post-aggregation" in name for name, _ in segments_of(folder))


@pytest.mark.parametrize("plan", ["pipeline", "servers"])
def test_sources_are_nodes_of_the_users_graph_and_every_one_is_somewhere(
    plan: str, request: pytest.FixtureRequest
) -> None:
    folder: PlanFolder = request.getfixturevalue(plan)
    theirs = {node.name: node for node in onnx.load(folder.path / "train.onnx").graph.node}
    seen: set[str] = set()
    for _, model in segments_of(folder):
        named = json.loads(metadata(model)["partc.source_nodes"])
        by_node = {
            node.name: entry.value
            for node in model.graph.node
            for entry in node.metadata_props
            if entry.key == "partc.source_node"
        }
        assert set(by_node.values()) <= set(named) <= theirs.keys()
        seen |= set(named)
    annotated = onnx.load(folder.path / "annotated.onnx")
    told = {
        node.name: next(e.value for e in node.metadata_props if e.key == "partc.segment")
        for node in annotated.graph.node
        if any(e.key == "partc.segment" for e in node.metadata_props)
    }
    assert told.keys() == seen
    if plan == "servers":  # the lookup in the table is on the servers, too
        lookups = [name for name, node in theirs.items() if node.op_type == "Gather" and "E" in node.input]
        assert lookups and all("server-lookup" in told[name] for name in lookups)
    for name, model in segments_of(folder):
        for source in json.loads(metadata(model)["partc.source_nodes"]):
            assert name in told[source].split(",")


def test_what_is_passed_on_has_the_type_that_onnxruntime_makes(tmp_path: Path) -> None:
    folder = compile_step(import_text(ADAM), tmp_path / "out", "2x2", "allreduce").folder
    for _, model in segments_of(folder):
        passed_on = {v for node in model.graph.node for v in node.output}
        passed_on -= {output.name for output in model.graph.output}
        told = {value.name: value.type.tensor_type for value in model.graph.value_info}
        assert told.keys() == passed_on
        del model.graph.output[:], model.graph.value_info[:]
        model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in sorted(told))
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        feeds = {info.name: np.ones(_shape(info), _dtype(info)) for info in model.graph.input}
        for name, made in zip(sorted(told), session.run(sorted(told), feeds), strict=True):
            assert onnx.helper.np_dtype_to_tensor_dtype(made.dtype) == told[name].elem_type
            assert [dim.dim_value for dim in told[name].shape.dim] == list(made.shape), name


def _shape(info: onnx.ValueInfoProto) -> list[int]:
    return [dim.dim_value for dim in info.type.tensor_type.shape.dim]


def _dtype(info: onnx.ValueInfoProto) -> np.dtype:
    return onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
