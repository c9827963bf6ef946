"""What the command line refuses: exit code 2, three parts, the repair; nothing is written or harmed.

Models, clusters and strategies: test_cli_refused_files.py.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.checks.command_line import CLUSTER, partc, refused
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("_nothing_is_harmed")


@pytest.mark.parametrize(
    ("command", "what", "fix"),
    [
        ("nonsense", "no such command 'nonsense'", "seal, run, checkpoint"),
        (
            "cluster nonsense",
            "no such command 'nonsense'",
            "use one of init, measure, or see `partc cluster --help`",
        ),
        ("cluster init --devices tpu", "'tpu' is not one of 'cpu', 'gpu'", "partc cluster init --help"),
        ("model", "missing argument 'name'", "partc model --help"),
        ("model mlp", "missing option", "partc model --help"),
        ("model mlp --nope -o n.onnx", "no such option: --nope", "partc model --help"),
        ("model nope -o n.onnx", "no model 'nope'", "resnet50"),
        ("model mlp --set width=4 -o n.onnx", "no option 'width'", "sizes"),
        ("model mlp --set sizes -o n.onnx", "'sizes' is not key=value", "batch=8"),
        ("model mlp --set batch=many -o n.onnx", "batch", "options are"),
        ("model mlp --set batch=-4 -o n.onnx", ">= 1", "options are"),
        ("model mlp -o folder", "the output is a folder", "name a file"),
        ("model mlp -o forward.onnx/n.onnx", "'forward.onnx' is a file", "another folder"),
        ("model mlp -o /proc/nowhere/n.onnx", "No such file", "can read and write"),
        ("grad nowhere.onnx --loss mse -o n.onnx", "no such file", "path of an ONNX model"),
        ("grad folder --loss mse -o n.onnx", "a folder, not a file", "path of an ONNX model"),
        ("grad text.onnx --loss mse -o n.onnx", "not an ONNX model", "copy or export"),
        ("grad forward.onnx -o n.onnx", "missing option '--loss'", "partc grad --help"),
        ("grad forward.onnx --loss hinge -o n.onnx", "'hinge'", "'logits'"),
        ("grad forward.onnx --loss logits -o n.onnx", "shape is [4, 3]", "reduce it to a scalar"),
        ("grad forward.onnx --loss mse --lr fast -o n.onnx", "'fast'", "'fed'"),
        ("grad forward.onnx --loss mse --lr -0.1 -o n.onnx", "'-0.1' is not a positive", "'fed'"),
        ("grad forward.onnx --loss mse --lr nan -o n.onnx", "'nan'", "'fed'"),
        ("grad forward.onnx --loss mse --optimizer adamax -o n.onnx", "'adagrad'", "partc grad --help"),
        ("grad forward.onnx --loss mse --batch-size two -o n.onnx", "'two'", "'dynamic'"),
        ("grad forward.onnx --loss mse --clip-global-norm -3 -o n.onnx", "-3.0", "positive number"),
        ("grad forward.onnx --loss mse --reinit --seed -1 -o n.onnx", "-1", "seed from 0"),
        ("grad forward.onnx --loss mse -o folder", "the output is a folder", "name a file"),
        ("grad forward.onnx --loss mse -o ./forward.onnx", "the output is the input", "another file"),
        ("inspect nowhere.onnx", "no such file", "path of an ONNX model"),
        ("inspect forward.onnx", "nothing says which outputs", "partc grad"),
        ("inspect train.onnx --state W", "'W' is not NAME=NAME", "W=W_next"),
        ("inspect train.onnx --state W=loss", "an update without a variable", "bind 'loss'"),
        ("inspect train.onnx --sample-axis x", "'x' is not NAME=AXIS", "rate=none"),
        (
            "inspect train.onnx --sample-axis q=0",
            "'q' is no data input",
            "use one of the data inputs labels, x",
        ),
        ("inspect train.onnx --sample-axis x=7", "sample axis 7", "from 0 to 1"),
        ("inspect train.onnx --loss gain", "unknown tensor 'gain'", "logits, loss"),
        ("inspect train.onnx --size batch", "'batch' is not NAME=N", "batch=16"),
        ("inspect train.onnx --size batch=0", "'batch=0'", "batch=16"),
        ("inspect train.onnx --size hour=3", "no symbolic size 'hour'", "leave it out"),
        ("inspect train.onnx --initial nowhere.npz", "no such file", ".npz or .safetensors"),
        ("inspect train.onnx --initial text.npz", "cannot be read", "write"),
        ("run nowhere --steps 1", "no plan", "partc compile -o"),
        ("run folder --steps 1", "no plan", "partc compile -o"),
        ("run train.onnx --steps 1", "no plan", "partc compile -o"),
        ("run out", "missing option '--steps'", "partc run --help"),
        ("run out --steps 0", "0 steps", "at least one"),
        ("run out --steps 1 --timeout 0", "timeout", "more than 0"),
        ("run out --steps 1 --on-nan pray", "'continue'", "partc run --help"),
        ("verify nowhere", "no plan", "partc compile -o"),
        ("verify out --steps 0", "0 steps", "at least one"),
        ("verify out --rtol -1", "-1.0", "from 0 on"),
        ("run out --steps 1 --data text.npz --trace text.npz", "the output is the input", "another file"),
        ("run out --steps 1 --trace out/plan.json", "a file of the plan in", "another file"),
        ("simulate out --trace out/plan.json", "a file of the plan in", "another file"),
        ("simulate out -c cluster.json --trace cluster.json", "the output is the input", "another file"),
        ("compare out out --html out/plan.json", "a file of the plan in", "another file"),
        ("compare measured.json out --html measured.json", "the output is the input", "another file"),
        ("checkpoint export out -o out/train.onnx", "a file of the plan in", "another file"),
        ("search train.onnx -c cluster.json -o cluster.json", "the output is the input", "another file"),
        ("profile train.onnx -c cluster.json -o cluster.json", "the output is the input", "another file"),
        ("cluster measure cluster.json -o cluster.json", "the output is the input", "another file"),
        ("cluster init --from hosts.txt -o hosts.txt", "the output is the input", "another file"),
        (
            "run out --steps 1 --trace-steps 3",
            "--trace-steps says nothing without --trace",
            "--trace as well",
        ),
        ("run out --steps 1 --keep 3", "--keep says nothing without --save-every", "--save-every as well"),
        (
            "run out --steps 1 --restarts 1 --min-hosts 5",
            "5 hosts at least, of which the plan has 2",
            "ask for 2",
        ),
        (
            "inspect train.onnx --sample-steps 2",
            "says nothing without --sample-data",
            "--sample-data as well",
        ),
        (
            "compile train.onnx -c out/cluster.json -o new --min-partitions 4",
            "--min-partitions says nothing without --search-partitions",
            "--search-partitions as well",
        ),
        *(
            (
                f"compile train.onnx -c out/cluster.json -o new {option}",
                f"{option.split()[0]} says nothing without --strategy search",
                "--strategy search as well",
            )
            for option in ("--budget 5s", "--seed 4", "--method dp", "--proposals 3", "--together steps")
        ),
        (
            "compile train.onnx -c out/cluster.json -o new --strategy placed --method dp",
            "--method says",
            "search",
        ),
        (
            "grad forward.onnx --loss mse --ignore-index 3 -o n.onnx",
            "says nothing",
            "softmax_cross_entropy as",
        ),
        ("grad forward.onnx --loss mse --seed 3 -o n.onnx", "says nothing", "--reinit as well"),
        ("grad forward.onnx --loss mse --no-decay * -o n.onnx", "says nothing", "--weight-decay as well"),
        ("grad forward.onnx --loss mse --group *:lr=1 --group *:lr=2 -o n.onnx", "groups before", "in one"),
        ("executor nowhere", "no job", "partc run"),
        ("executor out", "no job", "partc run"),
    ],
)
def test_a_wrong_command_is_refused(folder: Path, command: str, what: str, fix: str) -> None:
    refused(*command.split(), what=what, fix=fix)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("compile train.onnx -c cluster.json -o new", "--fetch-gradients"),
        ("compile train.onnx -c cluster.json -o new", "--size"),
        ("run out --steps 1", "--save-every"),
        ("checkpoint ls out", "--checkpoints"),
    ],
)
def test_an_empty_value_is_not_an_option_left_out(folder: Path, command: str, option: str) -> None:
    for words in ((option, ""), (f"{option}=",)):
        refused(*command.split(), *words, what="an empty value", at=option, fix="leave it out")


def test_an_unknown_strategy_is_a_mistake_of_the_option_and_not_of_the_graph(folder: Path) -> None:
    answer = partc("compile", "train.onnx", "-c", CLUSTER, "-o", "new", "--strategy", "tensr=2")

    assert "\n  at:  --strategy\n" in answer.error


def test_sums_over_replicas_are_refused_by_what_leaves_one_batch(folder: Path) -> None:
    compile_ = ("compile", "train.onnx", "-c", CLUSTER, "-o", "new")

    refused(
        *(*compile_, "--sum-dense", "--batch", "global"),
        at="--sum-dense with --batch global",
        fix="leave --sum-dense out, or leave --batch out:",
    )
    refused(
        *(*compile_, "--sum-dense", "--sum-sparse", "--strategy", "placed"),
        at="--sum-dense and --sum-sparse with --strategy placed",
        fix="leave --sum-dense and --sum-sparse out, or use --strategy allreduce:",
    )


WRONG_DATA = (
    ("nope", "'nope' is of no known form", "synthetic or MODULE:FUNC"),
    ("nowhere.npz", "no such file", "numpy.savez"),
    ("folder", "a folder without data", ".npz, .npy or .parquet"),
    ("text.npz", "not an .npz file", "numpy.savez"),
    ("nomodule:f", "No module named 'nomodule'", "a function without arguments"),
    ("os:nofunction", "no attribute 'nofunction'", "a function without arguments"),
    ("os:getcwd", "gives str objects, not batches", "a dict of input name -> array"),
)
OPENING = ("verify out --steps 1", "run out --steps 1")


# A run starts daemons, which open the data by the same code: a file and a function are enough.
@pytest.mark.parametrize(
    ("command", "data", "what", "fix"),
    sampled([(command, *wrong) for command in OPENING for wrong in WRONG_DATA], (*range(7), 10, 13)),
)
def test_wrong_data_is_refused(folder: Path, command: str, data: str, what: str, fix: str) -> None:
    refused(*command.split(), "--data", data, what=what, fix=fix)


@pytest.mark.parametrize(
    ("arrays", "what", "at", "fix"),
    [
        ({}, "no data for input 'labels'", "data", "['labels', 'x']"),
        ({"labels": np.zeros(16)}, "float64", "'labels'", "astype('int64')"),
        ({"labels": np.zeros((16, 2), np.int64)}, "[16, 2], the model reads [4]", "'labels'", "rank 1"),
        ({"labels": np.zeros(16, np.int64), "z": np.zeros(16)}, "'z'", "data", "nothing else"),
        ({"labels": np.zeros(0, np.int64)}, "[0]", "'labels'", "at least one sample"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, arrays: dict[str, np.ndarray], what: str, at: str, fix: str
) -> None:
    np.savez(tmp_path / "data.npz", allow_pickle=False, x=np.zeros((16, 6), np.float32), **arrays)

    refused("verify", "out", "--steps", "1", "--data", tmp_path / "data.npz", what=what, at=at, fix=fix)


@pytest.mark.parametrize(
    ("out", "what", "fix"),
    [
        ("folder", "not a plan's folder", "empty or new folder"),
        ("forward.onnx", "not a plan's folder", "empty or new folder"),
        (".", "current folder", "a folder of its own"),
        ("forward.onnx/new", "is a file", "another folder"),
    ],
)
def test_an_output_that_is_no_plan_is_not_replaced(folder: Path, out: str, what: str, fix: str) -> None:
    refused("compile", "train.onnx", "-c", CLUSTER, "-o", out, what=what, fix=fix)
