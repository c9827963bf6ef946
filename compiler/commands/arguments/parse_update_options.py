"""Turn the texts of `partc grad`'s options into an optimizer and what surrounds it.

--set-optimizer beta1=0.8                    a setting of the optimizer
--schedule cosine:steps=1000,floor=0.1       a schedule and its settings
--group '*.bias,*norm*:lr=0.1'               patterns of names, and what is theirs
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from typing import get_type_hints

from partc.compiler.commands.arguments.parse_options import name_once, parse_learning_rate
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.loss_scaling import DynamicScale, LossScale, StaticScale
from partc.compiler.differentiation.updates.optimizers import OPTIMIZERS, Optimizer
from partc.compiler.differentiation.updates.schedules import (
    ConstantRate,
    CosineDecay,
    ExponentialDecay,
    LearningRateSchedule,
    StepDecay,
    Warmup,
)
from partc.compiler.differentiation.updates.update_options import ParameterGroup
from partc.runtime.errors import BadUsage, one_of

SCHEDULES: Mapping[str, type[LearningRateSchedule]] = {
    "constant": ConstantRate,
    "step": StepDecay,
    "exponential": ExponentialDecay,
    "cosine": CosineDecay,
}
Value = float | bool


def parse_optimizer(name: str, lr: str, settings: Sequence[str], weight_decay: float | None) -> Optimizer:
    """Return an optimizer; what is not given stays as it is by default. Raises BadUsage."""
    defaults = OPTIMIZERS[name]
    values: dict[str, object] = dict(_parse_settings(",".join(settings), type(defaults), "--set-optimizer"))
    if lr:
        values["lr"] = parse_learning_rate(lr)
    if weight_decay is not None:
        values["weight_decay"] = weight_decay
    return replace(defaults, **values)  # type: ignore[type-var]  # every optimizer is a dataclass


def parse_schedule(text: str) -> LearningRateSchedule | None:
    """Parse `name:key=value,...`; empty text is None. Raises BadUsage."""
    if not text:
        return None
    name, _, settings = text.partition(":")
    if name not in SCHEDULES:
        raise BadUsage(f"no schedule {name!r}", at="--schedule", fix=one_of(SCHEDULES, name))
    kind = SCHEDULES[name]
    values = _parse_settings(settings, kind, "--schedule")
    required = [field.name for field in fields(kind) if field.default is MISSING]  # type: ignore[arg-type]
    if missing := [key for key in required if key not in values]:
        fix = f"write --schedule {name}:{','.join(f'{key}=...' for key in required)}"
        raise BadUsage(f"schedule {name!r} needs {missing[0]}", at="--schedule", fix=fix)
    return kind(**values)


def parse_warmup(updates: int) -> Warmup | None:
    """Return a warm-up of so many updates; 0: none. Raises BadUsage."""
    if updates < 0:
        fix = "give a whole number, 0 for none"
        raise BadUsage(f"a warm-up of {updates} updates", at="--warmup", fix=fix)
    return Warmup(updates) if updates else None


def parse_groups(no_decay: str, groups: Sequence[str]) -> tuple[ParameterGroup, ...]:
    """Parse --group texts, and --no-decay as the last group. Raises BadUsage."""
    parsed = [_parse_group(text) for text in groups]
    if no_decay:
        parsed.append(ParameterGroup(tuple(no_decay.split(",")), weight_decay=0.0))
    return tuple(parsed)


def parse_parameters(train: str, freeze: str) -> ParameterChoice:
    """Parse the comma-separated patterns of --train and --freeze."""
    return ParameterChoice(_patterns(train) or None, _patterns(freeze))


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def parse_loss_scale(text: str) -> LossScale | None:
    """Parse a number or `dynamic`; empty text is None. Raises BadUsage."""
    if not text:
        return None
    return DynamicScale() if text == "dynamic" else StaticScale(_number(text, float, "--loss-scale"))


def _parse_group(text: str) -> ParameterGroup:
    patterns, colon, settings = text.rpartition(":")
    if not (patterns and colon and settings):
        fix = "write --group '*.bias,*norm*:lr=0.1,weight_decay=0'"
        raise BadUsage(f"{text!r} is not PATTERNS:KEY=VALUE,...", at="--group", fix=fix)
    at = f"--group {patterns}"
    values = _parse_pairs(settings, ("lr", "weight_decay"), at)
    rate = parse_learning_rate(values["lr"], at, may_be_zero=True) if "lr" in values else None
    decay = _number(values["weight_decay"], float, at) if "weight_decay" in values else None
    return ParameterGroup(tuple(patterns.split(",")), rate, decay)


def _parse_settings(text: str, kind: type, at: str) -> dict[str, Value]:
    """Parse `key=value,...` into values of the fields that a dataclass has."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.name not in ("lr", "weight_decay")]
    return {key: _number(value, hints[key], at) for key, value in _parse_pairs(text, names, at).items()}


def _parse_pairs(text: str, keys: Sequence[str], at: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in keys:
            fix = f"write KEY=VALUE: {one_of(keys, key)}" if keys else "leave settings out"
            raise BadUsage(f"{part!r} is no setting here", at=at, fix=fix)
        name_once(pairs, key, value, at)
    return pairs


def _number(text: str, kind: type, at: str) -> Value:
    """Read a text as a float, an int or a bool."""
    if kind is bool and text in ("true", "false"):
        return text == "true"
    try:
        if kind is not bool:
            return int(text) if kind is int else float(text)
    except ValueError:
        pass
    expectation = {bool: "'true' or 'false'", int: "a whole number"}.get(kind, "a number")
    raise BadUsage(f"{text!r} is not {expectation}", at=at, fix=f"give {expectation}")
