"""Why a pipeline's stages have unequal work: said where they have, in the report and when compiling."""

from pathlib import Path

import onnx
import pytest

from partc.compiler.commands.compile import _warnings
from partc.compiler.compilation import Compilation
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import DECIDE, run
from partc.compiler.planning.explain_stages import explain_stages
from partc.models.catalogue import build_model
from tests.builders.graphs.soap_models import soap_model
from tests.builders.plans.compiled_reports import TextReader
from tests.builders.plans.compiled_steps import cluster_of, compile_step


def explained(model: onnx.ModelProto, strategy: str) -> str:
    options = Options(strategy=strategy, batch="global")
    compilation = Compilation(import_training_graph(model), cluster_of("2x2"), options)
    run(DECIDE, compilation)
    return explain_stages(compilation).replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("model", "strategy", "weight", "busy"),
    [
        ("gpt2", "pipeline=2,microbatches=2", "wte", "next to nothing to do"),
        ("tied translation", "pipeline=4,microbatches=2", "E", "next to nothing to do"),
        ("lm", "pipeline=2,microbatches=2", "lstm.projection_weight", "times as long as the mean"),
    ],
)
def test_a_weight_that_several_stages_would_read_is_named(
    model: str, strategy: str, weight: str, busy: str
) -> None:
    told = explained(onnx.load_from_string(soap_model(model)), strategy)

    assert busy in told
    assert f"{weight} (" in told and "is read at several places" in told


def test_one_large_operator_is_named() -> None:
    forward = build_model("mlp", sizes=(2048, 2048, 8, 8), batch=64)
    training = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))

    told = explained(training, "pipeline=2,microbatches=2")

    assert "MatMul" in told and "alone takes" in told and "several places" not in told


@pytest.mark.parametrize("model", ["mlp", "bert"])
def test_even_stages_need_no_reason(model: str) -> None:
    assert explained(onnx.load_from_string(soap_model(model)), "pipeline=2,microbatches=2") == ""


def test_the_report_and_the_command_say_it(tmp_path: Path) -> None:
    training = import_training_graph(onnx.load_from_string(soap_model("gpt2")))
    made = compile_step(training, tmp_path / "out", "2x2", "pipeline=2,microbatches=2", "global")

    told = made.compilation.uneven_stages

    assert "wte (" in told
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert told.replace("\u00a0", " ") in TextReader.read(page)
    assert told in _warnings(made.compilation)
