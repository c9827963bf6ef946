"""What the options of `partc grad` say about updates."""

from pathlib import Path

import onnx
import pytest

from partc.compiler.commands.arguments.parse_update_options import (
    parse_groups,
    parse_loss_scale,
    parse_optimizer,
    parse_schedule,
    parse_warmup,
)
from partc.compiler.commands.cli import main
from partc.compiler.differentiation.updates.adam import AdamW
from partc.compiler.differentiation.updates.loss_scaling import DynamicScale, StaticScale
from partc.compiler.differentiation.updates.optimizers import OPTIMIZERS, Adagrad, Momentum
from partc.compiler.differentiation.updates.schedules import CosineDecay, StepDecay
from partc.compiler.differentiation.updates.update_options import ParameterGroup
from partc.runtime.errors import BadUsage
from tests.checks.training_steps import facts_of


def test_what_is_not_given_stays_the_optimizers_own() -> None:
    assert parse_optimizer("adagrad", "", [], None) == Adagrad()
    assert parse_optimizer("nesterov", "0.5", [], None) == Momentum(0.5, nesterov=True)


def test_settings_have_the_types_of_the_optimizers_fields() -> None:
    made = parse_optimizer("adamw", "fed", ["beta1=0.8,lazy=true", "epsilon=1e-6"], 0.2)

    assert made == AdamW("fed", beta1=0.8, epsilon=1e-6, weight_decay=0.2, lazy=True)


def test_schedules_groups_and_scales_are_read() -> None:
    assert parse_schedule("cosine:steps=10,floor=0.1") == CosineDecay(10, 0.1)
    assert parse_schedule("step:every=3") == StepDecay(3)
    assert parse_schedule("") is None
    assert parse_groups("*.bias,*norm*", ["a*:lr=fed,weight_decay=0.1"]) == (
        ParameterGroup(("a*",), "fed", 0.1),
        ParameterGroup(("*.bias", "*norm*"), weight_decay=0.0),
    )
    assert parse_groups("", ["a*:lr=0"]) == (ParameterGroup(("a*",), 0.0),)
    assert (parse_loss_scale("dynamic"), parse_loss_scale("8")) == (DynamicScale(), StaticScale(8.0))


@pytest.mark.parametrize(
    ("read", "at", "fix"),
    [
        (lambda: parse_optimizer("sgd", "", ["beta1=0.5"], None), "--set-optimizer", "decoupled, lazy"),
        (lambda: parse_optimizer("adam", "", ["lazy=yes"], None), "--set-optimizer", "'true' or 'false'"),
        (lambda: parse_optimizer("adam", "", ["beta1=x"], None), "--set-optimizer", "a number"),
        (lambda: parse_schedule("linear"), "--schedule", "cosine"),
        (lambda: parse_schedule("constant:x=1"), "--schedule", "leave settings out"),
        (lambda: parse_schedule("cosine:floor=0.1"), "--schedule", "cosine:steps=..."),
        (lambda: parse_schedule("step:every=1.5"), "--schedule", "a whole number"),
        (lambda: parse_groups("", ["*.bias"]), "--group", "'*.bias,*norm*:lr=0.1,weight_decay=0'"),
        (lambda: parse_groups("", ["*.bias:decay=1"]), "--group *.bias", "lr, weight_decay"),
        (lambda: parse_groups("", ["a,b*:lr=-1"]), "--group a,b*", "a number, or 'fed'"),
        (lambda: parse_groups("", ["a,b*:weight_decay=x"]), "--group a,b*", "a number"),
        (lambda: parse_groups("", ["a,b*:weight_decay=-1"]), "--group a,b*", "a number of at least 0"),
        (lambda: parse_loss_scale("auto"), "--loss-scale", "a number"),
        (lambda: parse_warmup(-1), "--warmup", "0 for none"),
    ],
)
def test_texts_that_mean_nothing_are_refused(read, at: str, fix: str) -> None:
    with pytest.raises(BadUsage) as error:
        read()

    assert error.value.at == at
    assert fix in error.value.fix


def test_the_command_takes_them_all(tmp_path) -> None:
    forward, out = str(tmp_path / "forward.onnx"), str(tmp_path / "train.onnx")
    assert main(["model", "mlp", "-o", forward]) == 0
    decay = ["--weight-decay", "0.1", "--no-decay", "*.bias"]
    clips = ["--clip-value", "1", "--clip-norm", "2", "--clip-global-norm", "3"]
    rates = ["--lr", "0.1", "--schedule", "cosine:steps=9", "--warmup", "3"]
    rest = ["--accumulate", "2", "--ema", "0.9", "--loss-scale", "dynamic", "--set-optimizer", "beta1=0.8"]

    loss = ["--loss", "softmax_cross_entropy"]

    code = main(["grad", forward, *loss, "--optimizer", "adamw", *decay, *clips, *rates, *rest, "-o", out])

    assert code == 0
    state = facts_of(onnx.load(out))["state"]
    assert {"loss_scale", "finite_steps", "micro_step", "step_count"} <= state.keys()


def test_every_optimizer_can_be_asked_for(tmp_path) -> None:
    forward = str(tmp_path / "forward.onnx")
    assert main(["model", "mlp", "-o", forward]) == 0

    for name in OPTIMIZERS:
        out = str(tmp_path / f"{name}.onnx")
        assert main(["grad", forward, "--loss", "softmax_cross_entropy", "--optimizer", name, "-o", out]) == 0


def test_every_optimizer_and_option_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "optimizers.md").read_text(encoding="utf-8")

    options = "clip-value clip-norm clip-global-norm schedule warmup accumulate ema loss-scale no-decay group"
    missing = [name for name in OPTIMIZERS if f"`{name}`" not in page]
    missing += [option for option in options.split() if f"`--{option} " not in page]
    assert missing == []
