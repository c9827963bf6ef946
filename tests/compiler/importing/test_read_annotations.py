"""ONNX's own multi-device metadata in the user's file: what it says is followed."""

from pathlib import Path

import numpy as np
import onnx
import pytest

import partc
from partc.compiler.api import compile_step
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.importing.read_annotations import strategy_of_annotations
from partc.compiler.options import GraphOptions, Options
from partc.compiler.verification.verify import launch_in_process
from partc.cost.strategy import AxisSplit, OpConfig, Strategy, Synchronisation
from partc.runtime.errors import BadModel
from partc.runtime.plan.plan_folder import read_plan_folder
from tests.builders.graphs.foreign_steps import SGD, TABLE, parse
from tests.builders.plans.compiled_steps import cluster_of

Shards = dict[int, list[tuple[int, int]]]  # axis -> (dim_value, num_shards)


def step(text: str = SGD, configuration: str = "mine", devices: int | list[str] = 4) -> onnx.ModelProto:
    """Return a step of named nodes, for so many devices or for these."""
    model = parse(text)
    model.ir_version = 11
    made = model.configuration.add(name=configuration)
    made.num_devices = devices if isinstance(devices, int) else len(devices)
    made.device.extend([] if isinstance(devices, int) else devices)
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"n{number}"
    for info in model.graph.input:
        if f"{info.name}_next" in {output.name for output in model.graph.output}:
            shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
            elements = info.type.tensor_type.elem_type
            size = 1
            for length in shape:
                size *= length
            model.graph.initializer.append(onnx.helper.make_tensor(info.name, elements, shape, [0.25] * size))
    return model


def node_of(model: onnx.ModelProto, tensor: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if tensor in node.output)


def shard(model: onnx.ModelProto, tensor: str, devices: list[int], axes: Shards) -> None:
    """Write by hand what the standard has for a tensor's shards."""
    place = node_of(model, tensor).device_configurations.add(configuration_id="mine")
    spec = place.sharding_spec.add(tensor_name=tensor, device=devices)
    for axis, factors in axes.items():
        dim = spec.sharded_dim.add(axis=axis)
        for size, shards in factors:
            dim.simple_sharding.add(dim_value=size, num_shards=shards)


def pinned(model: onnx.ModelProto, cluster: str = "2x2") -> Strategy:
    onnx.checker.check_model(model)
    state = {o.name.removesuffix("_next"): o.name for o in model.graph.output if o.name.endswith("_next")}
    training = import_training_graph(model, GraphOptions(state=state))
    strategy = strategy_of_annotations(training, {}, cluster_of(cluster))
    assert strategy is not None
    return strategy


def compiled(model: onnx.ModelProto, out: Path, cluster: str = "2x2") -> Path:
    state = {o.name.removesuffix("_next"): o.name for o in model.graph.output if o.name.endswith("_next")}
    compile_step(model, cluster_of(cluster), out, Options(options=GraphOptions(state=state)))
    report = partc.verify(out, steps=2, launcher=launch_in_process)
    assert report.passed, report.summary()
    return out


def specs_of(path: Path) -> dict[str, onnx.ShardingSpecProto]:
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    places = [place for node in model.graph.node for place in node.device_configurations]
    return {spec.tensor_name: spec for place in places for spec in place.sharding_spec}


def test_an_operator_runs_where_its_annotation_says_and_trains_as_one_device(tmp_path: Path) -> None:
    model = step()
    shard(model, "y", [3, 1], {0: [(8, 2)]})

    out = compiled(model, tmp_path / "out")

    spec = specs_of(out / "annotated.onnx")["y"]
    assert list(spec.device) == [3, 1]
    assert [(d.axis, [(f.dim_value, f.num_shards) for f in d.simple_sharding]) for d in spec.sharded_dim] == [
        (0, [(8, 2)])
    ]


def test_devices_are_known_by_name_and_dimensions_by_what_they_are() -> None:
    model = step(devices=["host1/cpu1", "host0/cpu0"])
    shard(model, "y", [0, 1], {-1: [(3, 2)]})

    every = OpConfig("*", devices=("host0/cpu0", "host0/cpu1", "host1/cpu0", "host1/cpu1"))
    own = OpConfig(node_of(model, "y").name, {"out:1": 2}, devices=("host1/cpu1", "host0/cpu0"))
    assert pinned(model).ops == (every, own)


def test_samples_are_told_from_other_axes_and_come_first() -> None:
    model = step()
    shard(model, "xt", [0, 1, 2, 3], {0: [(4, 2)], 1: [(8, 2)]})

    (_, own) = pinned(model).ops
    # x is [samples, 4], so xt has its samples along axis 1: shard (a, b) is on device 2 a + b.
    assert own.split == {"batch": 2, "out:0": 2}
    assert own.devices == ("host0/cpu0", "host1/cpu0", "host0/cpu1", "host1/cpu1")


def test_a_pipeline_of_the_stages_that_are_named(tmp_path: Path) -> None:
    forward = partc.build_model("mlp", sizes=(6, 8, 3), batch=4)
    model = partc.build_training_graph(forward, loss="softmax_cross_entropy", optimizer=partc.SGD(0.5))
    model.ir_version = 11
    model.configuration.add(name="mine", num_devices=4)
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    for stage, node in enumerate(products[:2]):
        place = node.device_configurations.add(configuration_id="mine")
        place.pipeline_stage = stage
    onnx.checker.check_model(model)

    compile_step(model, cluster_of("2x2"), tmp_path / "out", Options())

    assert partc.verify(tmp_path / "out", steps=2, launcher=launch_in_process).passed
    annotated = onnx.load(tmp_path / "out/annotated.onnx")
    stages = {
        node.name: place.pipeline_stage
        for node in annotated.graph.node
        for place in node.device_configurations
    }
    assert [stages[node.name] for node in products[:2]] == [0, 1]


def test_rows_of_the_servers_and_parts_of_all_workers() -> None:
    model = step(TABLE, devices=["host0/gpu0", "host1/gpu0", "host0/server", "host1/server"])
    shard(model, "E_next", [2, 3], {0: [(10, 2)]})
    assert pinned(model, "2x1s").parameters == {"E": Synchronisation("servers")}

    model = step()
    shard(model, "W_next", [0, 1, 2, 3], {0: [(4, 4)]})
    strategy = pinned(model)
    assert (strategy.mesh, strategy.variables) == ({"data": 4}, {"W": {"data": AxisSplit(0)}})


@pytest.mark.parametrize("strategy", ["allreduce", "pipeline=2,data=2"])
def test_what_partc_writes_is_what_it_reads(tmp_path: Path, strategy: str) -> None:
    """A plan of the annotated graph divides every tensor as the plan did that it comes from."""
    forward = partc.build_model("mlp", sizes=(6, 8, 3), batch=8)
    model = partc.build_training_graph(forward, loss="softmax_cross_entropy", optimizer=partc.SGD(0.5))
    first, second = tmp_path / "first", tmp_path / "second"
    compile_step(model, cluster_of("2x2"), first, Options(strategy=strategy, batch="global"))
    annotated = onnx.load(first / "annotated.onnx")

    zeros = {v.name: np.zeros(v.shape, v.dtype) for v in read_plan_folder(first).plan.variables}
    np.savez(tmp_path / "zeros.npz", **zeros)
    options = Options(options=GraphOptions(initial=tmp_path / "zeros.npz"))
    compile_step(annotated, cluster_of("2x2"), second, options)

    again = onnx.load(second / "annotated.onnx")
    for before, after in zip(annotated.graph.node, again.graph.node, strict=True):
        assert list(before.device_configurations) == list(after.device_configurations), before.name
    assert list(annotated.configuration) == list(again.configuration)


def test_a_table_on_servers_stays_there_and_every_replica_keeps_its_batch(tmp_path: Path) -> None:
    sizes = {"vocab": 50, "embedding": 4, "cells": 4, "projection": 4, "steps": 2, "samples": 3}
    forward = partc.build_model("lm", batch=2, **sizes)
    model = partc.build_training_graph(forward, loss="loss", optimizer=partc.SGD(0.1))
    options = Options(strategy="ps", batch="per-replica")
    compile_step(model, cluster_of("2x2"), tmp_path / "first", options)
    first = read_plan_folder(tmp_path / "first").plan
    np.savez(tmp_path / "zeros.npz", **{v.name: np.zeros(v.shape, v.dtype) for v in first.variables})
    initial = GraphOptions(initial=tmp_path / "zeros.npz")

    compile_step(
        onnx.load(tmp_path / "first/annotated.onnx"),
        cluster_of("2x2"),
        tmp_path / "second",
        Options(options=initial),
    )

    second = read_plan_folder(tmp_path / "second").plan
    assert second.batch == first.batch == "per-replica"
    on_servers = [{v.name for v in plan.variables if v.method == "servers"} for plan in (first, second)]
    assert on_servers[0] and on_servers[0] <= on_servers[1]


def test_an_explicit_strategy_goes_before_annotations_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = step()
    shard(model, "y", [0, 1], {0: [(8, 2)]})

    state = GraphOptions(state={"W": "W_next"})
    options = Options(strategy="allreduce", options=state, batch="global")
    compile_step(model, cluster_of("2x2"), tmp_path / "out", options)

    assert "not followed" in caplog.text
    assert list(specs_of(tmp_path / "out/annotated.onnx")["y"].device) == [0, 1, 2, 3]


def test_what_cannot_be_followed_is_refused_and_says_where() -> None:
    other = step(devices=["a", "b"])
    shard(other, "y", [0, 1], {0: [(8, 2)]})
    with pytest.raises(BadModel, match=r"other devices: 'mine' of 2(.|\n)*configuration(.|\n)*host0/cpu0"):
        pinned(other)

    for devices, axes, what in (
        ([0, 1, 2], {0: [(8, 2)]}, "3 devices for 2 shards"),
        ([0, 9], {0: [(8, 2)]}, "a device that the configuration does not have"),
        ([0, 1], {2: [(8, 2)]}, "axis 2 of 2"),
    ):
        model = step()
        shard(model, "y", devices, axes)
        with pytest.raises(BadModel, match=rf"{what}(.|\n)*sharding of 'y'"):
            pinned(model)

    copies = step()
    shard(copies, "y", [4, 5], {0: [(8, 2)]})
    spec = node_of(copies, "y").device_configurations[0].sharding_spec[0]
    for key, group in ((4, [0, 1]), (5, [2, 3])):
        spec.index_to_device_group_map.add(key=key, value=group)
    with pytest.raises(BadModel, match=r"copies of shards(.|\n)*strategy.json"):
        pinned(copies)


def test_a_file_without_annotations_pins_nothing() -> None:
    model = step()
    training = import_training_graph(model, GraphOptions(state={"W": "W_next"}))

    assert strategy_of_annotations(training, {}, cluster_of("2x2")) is None
