"""The models that partc can write, by name, and how many parameters a model has.

Options are msgspec structs: one declaration gives their types, defaults, limits and descriptions.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
import onnx
from onnx import numpy_helper

from partc.models.early_cnns import AlexnetOptions, LenetOptions, alexnet, lenet
from partc.models.flexflow_rnns import (
    FlexflowNmtOptions,
    RnnlmOptions,
    RnntcOptions,
    flexflow_nmt,
    rnnlm,
    rnntc,
)
from partc.models.graph_builder import METADATA_KEY, ModelOptions
from partc.models.inception_v3 import InceptionV3Options, inception_v3
from partc.models.lm import LmOptions, lm
from partc.models.mlp import MlpOptions, mlp
from partc.models.moe import MoeOptions, moe
from partc.models.nmt import NmtOptions, nmt
from partc.models.resnet import ResNet101Options, ResNetOptions, resnet50, resnet101

AnyOptions = TypeVar("AnyOptions", bound=ModelOptions)


class ModelRequestError(ValueError):
    """No such model, or an option that it does not take: what, where, and what to do.

    `models` stands alone, so this is not a PartcError; the command line makes it one.
    """

    def __init__(self, what: str, *, at: str, fix: str) -> None:
        super().__init__(f"{what}\n  at:  {at}\n  fix: {fix}")
        self.what = what
        self.at = at
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Model(Generic[AnyOptions]):
    """A builder, what it takes, and a line about it."""

    description: str
    options: type[AnyOptions]
    build: Callable[[AnyOptions], onnx.ModelProto]
    published: str = ""  # millions of parameters in the Parallax paper's table 1: dense, then sparse

    def build_with(self, at: str, options: Mapping[str, object]) -> onnx.ModelProto:
        """Build from option values, numbers and lists written as text included."""
        if unknown := sorted(options.keys() - set(option_names(self))):
            fix = f"options are {', '.join(option_names(self))}"
            raise ModelRequestError(f"no option {unknown[0]!r}", at=at, fix=fix)
        try:
            return self.build(msgspec.convert(dict(options), self.options, strict=False))
        except msgspec.ValidationError as error:
            raise ModelRequestError(
                str(error), at=at, fix=f"options are {', '.join(option_names(self))}"
            ) from error


@dataclass(frozen=True, slots=True)
class OptionHelp:
    """One option, as a person reads it."""

    name: str
    default: str
    description: str


AnyModel = (
    Model[MlpOptions]
    | Model[ResNetOptions]
    | Model[InceptionV3Options]
    | Model[LmOptions]
    | Model[NmtOptions]
    | Model[LenetOptions]
    | Model[AlexnetOptions]
    | Model[ResNet101Options]
    | Model[RnntcOptions]
    | Model[RnnlmOptions]
    | Model[FlexflowNmtOptions]
    | Model[MoeOptions]
)
MODELS: dict[str, AnyModel] = {
    "mlp": Model("multi-layer perceptron; outputs logits", MlpOptions, mlp),
    "resnet50": Model("ResNet-50 for images; outputs logits", ResNetOptions, resnet50, "26 + 0"),
    "inception_v3": Model(
        "Inception-v3 for images; outputs logits", InceptionV3Options, inception_v3, "24 + 0"
    ),
    "lm": Model("LSTM language model with a sampled softmax; outputs its loss", LmOptions, lm, "9 + 814"),
    "nmt": Model("LSTM translation model with attention; outputs its loss", NmtOptions, nmt, "94 + 75"),
    "lenet": Model("LeNet-5 for digits; outputs logits", LenetOptions, lenet),
    "alexnet": Model("AlexNet for images; outputs logits", AlexnetOptions, alexnet),
    "resnet101": Model("ResNet-101 for images; outputs logits", ResNet101Options, resnet101),
    "rnntc": Model("LSTM text classifier; outputs logits", RnntcOptions, rnntc),
    "rnnlm": Model("LSTM language model with a full softmax; outputs its loss", RnnlmOptions, rnnlm),
    "flexflow_nmt": Model(
        "LSTM translation model of the FlexFlow paper; outputs its loss", FlexflowNmtOptions, flexflow_nmt
    ),
    "moe": Model("LSTM language model with a mixture of experts; outputs its loss", MoeOptions, moe),
}


def build_model(name: str, **options: object) -> onnx.ModelProto:
    """Build a model by name. Raises ModelRequestError."""
    if name not in MODELS:
        raise ModelRequestError(f"no model {name!r}", at="model name", fix=f"use one of {sorted(MODELS)}")
    return MODELS[name].build_with(f"options of model {name!r}", options)


def parse_options(texts: list[str]) -> dict[str, object]:
    """Turn `key=value` texts into options; commas make a list. Raises ModelRequestError."""
    options: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals and value):
            raise ModelRequestError(
                f"{text!r} is not key=value", at="model options", fix="write, say, batch=8"
            )
        said = value.split(",") if "," in value else value
        if options.setdefault(key, said) != said:
            raise ModelRequestError(f"two values of {key}", at="model options", fix=f"name {key} once")
    return options


def describe_options(name: str) -> tuple[OptionHelp, ...]:
    """List what a model takes, with defaults and descriptions."""
    schema = msgspec.json.schema(MODELS[name].options)
    properties = schema["$defs"][MODELS[name].options.__name__]["properties"]
    return tuple(
        OptionHelp(option, _text(facts.get("default")), facts.get("description", ""))
        for option, facts in properties.items()
    )


def option_names(model: Model[AnyOptions]) -> list[str]:
    """List the names of a model's options."""
    return list(model.options.__struct_fields__)


def _text(default: object) -> str:
    if isinstance(default, list | tuple):
        return ",".join(str(entry) for entry in default)
    return "none" if default is None else str(default)


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Elements of parameters; sparse are those of tables that only Gathers read, row by row."""

    dense: int
    sparse: int


def count_parameters(model: onnx.ModelProto) -> ParameterCount:
    """Return the parameters of a model that this package built."""
    facts = next(entry.value for entry in model.metadata_props if entry.key == METADATA_KEY)
    makers = {node.output[0]: node for node in model.graph.node}
    counted = {"dense": 0, "sparse": 0}
    for name in json.loads(facts)["parameters"]:
        readers = [node for node in model.graph.node if name in node.input]
        is_table = all(node.op_type == "Gather" and node.input[0] == name for node in readers)
        counted["sparse" if is_table else "dense"] += math.prod(_shape(makers[name], makers))
    return ParameterCount(**counted)


def _shape(maker: onnx.NodeProto, makers: dict[str, onnx.NodeProto]) -> tuple[int, ...]:
    """Return the shape that a draw, or a ConstantOfShape of a constant, makes."""
    shape = next((attribute.ints for attribute in maker.attribute if attribute.name == "shape"), None)
    if shape is not None:
        return tuple(shape)
    (attribute,) = makers[maker.input[0]].attribute
    if attribute.name == "value_ints":
        return tuple(attribute.ints)
    return tuple(int(size) for size in numpy_helper.to_array(attribute.t))
