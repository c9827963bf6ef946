"""Labels and ids that the model cannot take, and samples that do not belong together, are refused."""

from itertools import product
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from onnx.shape_inference import infer_shapes

from partc.passes.roles.find_taken_values import find_taken_values
from partc.runtime.data.checkpoint import write_arrays
from partc.runtime.plan.variables import TakenValues
from tests.builders.graphs.foreign_steps import parse
from tests.checks.command_line import PAIR, done, make_mlp, refused
from tests.sampling import sampled


@pytest.mark.parametrize(
    ("use", "taken"),
    [
        (
            "flat = Reshape (ids, all) wide = Cast <to = 7> (flat) y = Gather (table, wide)",
            TakenValues(50, (), -50),
        ),
        ("loss = SoftmaxCrossEntropyLoss (logits, ids)\n y = Identity (loss)", TakenValues(7)),
        ("loss = SoftmaxCrossEntropyLoss <ignore_index = -100> (logits, ids)\n y = Identity (loss)",
         TakenValues(7, (-100,))),
        ("bad = Equal (ids, pad)  safe = Where (bad, none, ids) y = Gather (table, safe)",
         TakenValues(50, (-9,), -50)),
        ("bad = Equal (ids, pad)  good = Not (bad) safe = Where (good, ids, none)"
         " y = Gather (table, safe)",
         TakenValues(50, (-9,), -50)),
        ("bad = Equal (ids, pad)  safe = Where (bad, none, ids) y = Gather (table, safe)"
         " z = Gather (table, ids)",
         TakenValues(50, (), -50)),
        ("bad = Less (ids, none)\n safe = Where (bad, none, ids) y = Gather (table, safe)", None),
        ("safe = Max (ids, none)\n y = Gather (table, safe)", None),
        ("y = OneHot (ids, depth, values)", None),
    ],
)  # fmt: skip
def test_values_that_the_graph_indexes_with_are_known(use: str, taken: TakenValues | None) -> None:
    text = f"""
    g (int32[4] ids, float[50,7] table, float[4,7] logits) => (y)
    <int64[1] all = {{-1}}, int64 depth = {{9}}, float[2] values = {{0, 1}}, int32 pad = {{-9}},
     int32 none = {{0}}>
    {{ {use} }}
    """

    graph = gs.import_onnx(infer_shapes(parse(text)))

    assert find_taken_values(graph).get("ids") == taken


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with plain/out, and ignored/out whose labels -100 do not count."""
    folder = tmp_path_factory.mktemp("plans")
    for name, options in (("plain", ()), ("ignored", ("--ignore-index", "-100"))):
        (folder / name).mkdir()
        make_mlp(folder / name, *options)
        done("compile", folder / name / "train.onnx", "-c", PAIR, "-o", folder / name / "out")
    return folder


def data(path: Path, labels: np.ndarray, rows: int = 64) -> Path:
    np.savez(path, x=np.ones((rows, 6), np.float32), labels=labels)
    return path


# A run starts daemons, which read the data by the same code.
@pytest.mark.parametrize(
    ("label", "command"), sampled(product((-1, -100, 3, 1 << 40), ("verify", "run")), (0, 1, 2, 4, 6))
)
def test_a_label_out_of_range_is_refused(plans: Path, tmp_path: Path, command: str, label: int) -> None:
    labels = np.zeros(64, np.int64)
    labels[21] = label
    path = data(tmp_path / "d.npz", labels)

    refused(
        command, plans / "plain" / "out", "--steps", "1", "--data", path,
        what=f"value {label}, where the model takes 0 to 2",
        at=f"{path}: data input 'labels', step 3, sample 21",
        fix="--ignore-index",
    )  # fmt: skip


def test_a_label_that_is_to_be_ignored_is_taken_and_no_other(plans: Path, tmp_path: Path) -> None:
    labels = np.tile([0, 1, -100, 2], 16)

    done("verify", plans / "ignored" / "out", "--steps", "1", "--data", data(tmp_path / "d.npz", labels))
    labels[5] = -1
    refused(
        "verify", plans / "ignored" / "out", "--data", data(tmp_path / "d.npz", labels),
        what="0 to 2 or -100", at="sample 5", fix="correct the data",
    )  # fmt: skip


def test_labels_that_do_not_belong_to_the_samples_are_refused(plans: Path, tmp_path: Path) -> None:
    path = data(tmp_path / "d.npz", np.zeros(63, np.int64))

    refused(
        "run", plans / "plain" / "out", "--steps", "1", "--data", path,
        what="64 samples of 'x' and 63 of 'labels'", at=str(path), fix="the same samples",
    )  # fmt: skip


def test_initial_values_of_no_variable_are_refused(plans: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "start.npz", **{"layer0.wieght": np.zeros((6, 8), np.float32)})

    refused(
        "inspect", plans / "plain" / "train.onnx", "--initial", tmp_path / "start.npz",
        what="'layer0.wieght', which is no variable", at="start.npz", fix="layer0.weight",
    )  # fmt: skip


def test_variables_of_another_optimizer_are_refused_with_the_way_that_works(
    plans: Path, tmp_path: Path
) -> None:
    model, trained = tmp_path / "trained.onnx", tmp_path / "trained.safetensors"
    write_arrays(trained, {"layer0.weight.mean": np.zeros((6, 8), np.float32)})

    refused(
        "inspect", plans / "plain" / "train.onnx", "--initial", trained,
        what="'layer0.weight.mean', which is no variable", at=str(trained), fix=f"partc grad {model} ...",
    )  # fmt: skip
