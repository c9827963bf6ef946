"""annotated.onnx: the user's graph with ONNX's own multi-device metadata."""

from pathlib import Path

import onnx
import pytest

from partc.compiler.output.annotate import annotate
from partc.passes.layouts.configuration import data_parallel
from partc.passes.layouts.layouts import Layout, Replicate, Split, served_rows
from partc.passes.layouts.meshes import Mesh, Meshes
from tests.builders.graphs.foreign_steps import SGD, TABLE, parse
from tests.builders.plans.compiled_steps import Compiled, cluster_of, compile_step, import_text

FOUR = data_parallel(4).meshes


def specs_of(model: onnx.ModelProto) -> dict[str, onnx.ShardingSpecProto]:
    return {
        spec.tensor_name: spec
        for node in model.graph.node
        for place in node.device_configurations
        for spec in place.sharding_spec
    }


def shards(spec: onnx.ShardingSpecProto) -> list[tuple[int, list[tuple[int, int]]]]:
    """Return, per sharded axis, its factors as (size, shards)."""
    return [
        (dim.axis, [(factor.dim_value, factor.num_shards) for factor in dim.simple_sharding])
        for dim in spec.sharded_dim
    ]


def annotated(compiled: Compiled) -> onnx.ModelProto:
    return onnx.load(compiled.folder.path / "annotated.onnx")


@pytest.mark.parametrize("batch", ["global", "per-replica"])
def test_it_passes_the_checker_and_names_the_devices_in_rank_order(tmp_path: Path, batch: str) -> None:
    compiled = compile_step(import_text(SGD), tmp_path / "out", "2x2s", batch=batch)
    model = annotated(compiled)

    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version >= 11
    (configuration,) = model.configuration
    assert list(configuration.device) == [
        *("host0/gpu0", "host0/gpu1", "host1/gpu0", "host1/gpu1"),
        *("host0/server", "host1/server"),
    ]
    assert configuration.num_devices == 6
    places = [place for node in model.graph.node for place in node.device_configurations]
    assert {place.configuration_id for place in places} <= {configuration.name}


def test_its_documentation_names_the_ranks_devices_once_behind_the_users_own() -> None:
    def annotate_for(hosts: str, model: onnx.ModelProto) -> onnx.ModelProto:
        return annotate(model, {}, {}, cluster_of(hosts), FOUR)

    model = parse(SGD)
    model.doc_string = "My model."

    again = annotate_for("2x2", annotate_for("1x4", model))

    own, told = again.doc_string.split("\n\n")
    assert own == "My model."
    assert told.endswith("Ranks: 0 host0/cpu0, 1 host0/cpu1, 2 host1/cpu0, 3 host1/cpu1.")


def test_without_its_annotations_it_is_the_users_graph(tmp_path: Path) -> None:
    compiled = compile_step(import_text(SGD), tmp_path / "out", "2x2", batch="global")
    model = annotated(compiled)
    for node in model.graph.node:
        told = {entry.key: entry.value for entry in node.metadata_props}
        assert list(told) == ["partc.segment", "partc.ranks", "partc.devices"]
        assert told["partc.devices"] == "host0/cpu0, host0/cpu1, host1/cpu0, host1/cpu1"
        del node.device_configurations[:], node.metadata_props[:]

    assert list(model.graph.node) == list(onnx.load(compiled.folder.path / "train.onnx").graph.node)


def test_a_global_batch_is_sharded_on_its_sample_axis_over_all_workers(tmp_path: Path) -> None:
    compiled = compile_step(import_text(SGD), tmp_path / "out", "2x2", "allreduce", "global")

    specs = specs_of(annotated(compiled))

    assert shards(specs["y"]) == [(0, [(8, 4)])]
    assert shards(specs["xt"]) == [(1, [(8, 4)])]
    assert list(specs["y"].device) == [0, 1, 2, 3]
    assert "dW" not in specs
    assert "W_next" not in specs


def test_replicas_own_batches_are_not_sharded(tmp_path: Path) -> None:
    compiled = compile_step(import_text(SGD), tmp_path / "out", "2x2", "allreduce", "per-replica")

    assert specs_of(annotated(compiled)) == {}


def test_rows_on_servers_are_sharded_over_the_servers(tmp_path: Path) -> None:
    compiled = compile_step(import_text(TABLE), tmp_path / "out", "2x1s", "ps", "global")

    spec = specs_of(annotated(compiled))["E_next"]

    assert shards(spec) == [(0, [(10, 2)])]
    assert list(spec.device) == [2, 3]


def test_an_inner_factor_stands_behind_the_outer_one() -> None:
    text = "graph (float[3,8,5] x) => (float[24,5] y) { y = Relu (x) }"
    layouts = {"y": Layout("worker", Split(axis=0, outer=3))}

    model = annotate(parse(text), layouts, {"y": (24, 5)}, cluster_of("2x2"), FOUR)

    assert shards(specs_of(model)["y"]) == [(0, [(3, 1), (8, 4)])]


def test_an_owned_table_and_a_whole_tensor() -> None:
    text = "graph (float[10,4] x) => (float[10,4] y, float[10,4] z) { y = Relu (x) z = Abs (x) }"
    layouts = {"y": served_rows("E"), "z": Layout("worker", Replicate())}

    specs = specs_of(annotate(parse(text), layouts, {"y": (10, 4), "z": (10, 4)}, cluster_of("2x2"), FOUR))

    assert list(specs) == ["y"]
    assert list(specs["y"].device) == [0, 2]  # servers share the process of their host's first worker


def test_ranks_that_hold_copies_are_groups() -> None:
    text = "graph (float[8,6] x) => (float[8,6] y) { y = Relu (x) }"
    layouts = {"y": Layout("worker", Replicate(), Split(axis=1, outer=3))}
    meshes = Meshes((Mesh("worker", (("data", 2), ("tensor", 2))),))

    spec = specs_of(annotate(parse(text), layouts, {"y": (8, 6)}, cluster_of("2x2"), meshes))["y"]

    assert shards(spec) == [(1, [(3, 1), (2, 2)])]
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    assert [groups[device] for device in spec.device] == [[0, 2], [1, 3]]


def test_two_mesh_axes_on_one_axis_lie_within_each_other() -> None:
    text = "graph (float[8,6] x) => (float[8,6] y) { y = Relu (x) }"
    layouts = {"y": Layout("worker", Split(axis=0), Split(axis=0))}
    meshes = Meshes((Mesh("worker", (("data", 2), ("tensor", 2))),))

    spec = specs_of(annotate(parse(text), layouts, {"y": (8, 6)}, cluster_of("2x2"), meshes))["y"]

    assert shards(spec) == [(0, [(8, 4)])]
    assert list(spec.device) == [0, 1, 2, 3]


def test_parts_that_differ_are_shards_of_their_factor() -> None:
    text = "graph (float[30,7] x) => (float[30,7] y, float[30,7] z) { y = Relu (x) z = Abs (x) }"
    layouts = {
        "y": Layout("worker", Split(0), Split(0, 1, 10)),  # ten rows of three entries: 3, 2, 3 and 2
        "z": Layout("worker", Replicate(), Split(1, 1, 7)),
    }
    meshes = Meshes((Mesh("worker", (("data", 2), ("tensor", 2))),))

    specs = specs_of(annotate(parse(text), layouts, {"y": (30, 7), "z": (30, 7)}, cluster_of("2x2"), meshes))

    assert shards(specs["y"]) == [(0, [(10, 4), (3, 1)])]
    assert list(specs["y"].device) == [0, 1, 2, 3]
    assert shards(specs["z"]) == [(1, [(7, 2)])]
