"""partc as a library: the functions that the command line calls."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import partc
from partc.compiler.verification.verify import launch_in_process
from partc.cost.cluster.cluster import read_cluster
from partc.runtime.plan.plan_folder import PlanFolder
from tests.checks.command_line import CLUSTER


@pytest.fixture(scope="module")
def train() -> onnx.ModelProto:
    forward = partc.build_model("mlp", sizes=(6, 8, 3), batch=4)
    return partc.build_training_graph(forward, loss="softmax_cross_entropy", optimizer=partc.Momentum(0.1))


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    return set(
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_importing_partc_loads_no_solver_and_no_graph_library() -> None:
    heavy = {"ortools", "onnx_graphsurgeon", "onnx", "networkx", "rich", "typer", "onnxruntime", "mpi4py"}

    assert not heavy & loaded_after("import partc")


def test_training_needs_the_runtime_alone() -> None:
    loaded = loaded_after("import partc\npartc.Runner")

    assert not {"ortools", "onnx_graphsurgeon", "onnx", "networkx", "partc.compiler"} & loaded


def test_every_public_name_is_there() -> None:
    assert all(getattr(partc, name) is not None for name in partc.__all__)
    assert {*partc.__all__, "__version__"} <= set(dir(partc))
    with pytest.raises(AttributeError, match="no attribute 'shrad'"):
        _ = partc.shrad


def test_compile_run_and_verify_as_functions(train: onnx.ModelProto, tmp_path: Path) -> None:
    plan = partc.compile(train, CLUSTER, tmp_path / "out")

    assert isinstance(plan, PlanFolder)
    assert plan.plan.replicas == 4
    result = partc.Runner(plan).train("synthetic", steps=2)
    assert result.variables["layer0.weight"].shape == (6, 8)
    assert len(result.outputs) == 2
    assert partc.verify(plan, steps=2, launcher=launch_in_process).passed


def test_compile_takes_a_model_or_its_file_and_gives_equal_plans(
    train: onnx.ModelProto, tmp_path: Path
) -> None:
    onnx.save(train, tmp_path / "train.onnx")

    one = partc.compile(train, read_cluster(Path(CLUSTER)), tmp_path / "one", strategy="ps", batch="global")
    other = partc.compile(
        str(tmp_path / "train.onnx"), CLUSTER, tmp_path / "two", strategy="ps", batch="global"
    )

    assert one.plan.files == other.plan.files


def test_inspect_returns_what_it_found(train: onnx.ModelProto) -> None:
    found = partc.inspect(train)

    assert [v.name for v in found.variables if v.gradient] == [
        *("layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias")
    ]
    assert {v.parameter for v in found.variables if v.role == "slot"} == {
        *("layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias")
    }


def test_batches_given_as_arrays_are_trained_on(train: onnx.ModelProto, tmp_path: Path) -> None:
    plan = partc.compile(train, CLUSTER, tmp_path / "out")
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(16, 6)).astype(np.float32), "labels": rng.integers(0, 3, 16)}

    result = partc.Runner(plan).train([batch] * 8, steps=8)

    losses = [float(output["loss"]) for output in result.outputs]
    assert losses[-1] < losses[0]


def test_an_error_is_a_partc_error_with_its_three_parts(tmp_path: Path) -> None:
    with pytest.raises(partc.PartcError) as error:
        partc.compile(tmp_path / "nowhere.onnx", CLUSTER, tmp_path / "out")

    assert (error.value.what, error.value.fix) == ("no such file", "give the path of an ONNX model")
    assert error.value.at.endswith("nowhere.onnx")
