"""Exports that the exporter did not optimise: partc's gradients of every parameter against PyTorch's.

Their sizes are computed while they run, their functions hold Loops and Ifs, and every parameter keeps its
name: a tied table is one, and nothing is folded into another. With a fixed batch and with symbolic sizes.
"""

import warnings
from collections.abc import Callable

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD
from tests.checks.training_steps import train

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.peers

WORDS, CELLS = 20, 9
RTOL = 1e-5  # of the largest gradient


class Recurrent(torch.nn.Module):
    """A recurrent layer between an embedding and a head."""

    def __init__(self, kind: str, **options: object) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(WORDS, 6)
        self.layer = getattr(torch.nn, kind)(6, CELLS, batch_first=True, **options)
        self.head = torch.nn.Linear(CELLS * (2 if options else 1), 4)

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        return self.head(self.layer(self.table(x))[0][:, -1])


class Bags(torch.nn.Module):
    """Means of embedded words, which the exporter writes as a Loop over the bags."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag = torch.nn.EmbeddingBag(WORDS, 6, mode=mode)
        self.head = torch.nn.Linear(6, 4)

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        return self.head(self.bag(x))


class Logits(torch.nn.Module):
    """A model of transformers that returns its logits."""

    def __init__(self, model: "torch.nn.Module") -> None:
        super().__init__()
        self.model = model

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        return self.model(x, use_cache=False, return_dict=False)[0]


TEXT = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT |= {"intermediate_size": 24, "max_position_embeddings": 16, "num_key_value_heads": 1}


def llama() -> Logits:
    return Logits(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)))


def gpt2() -> Logits:
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return Logits(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))


MODULES: dict[str, Callable[[], "torch.nn.Module"]] = {
    "gru": lambda: Recurrent("GRU"),
    "lstm": lambda: Recurrent("LSTM"),
    "lstm, two layers, both ways": lambda: Recurrent("LSTM", num_layers=2, bidirectional=True),
    "bags, mean": lambda: Bags("mean"),
    "bags, max": lambda: Bags("max"),
    "llama": llama,
    "gpt2": gpt2,
}
LONG = {"lstm, two layers, both ways", "bags, max", "gpt2"}
SYMBOLIC = {"gru": ("batch",), "lstm": ("batch",), "llama": ("batch", "tokens"), "gpt2": ("batch", "tokens")}


def exported(module: "torch.nn.Module", x: "torch.Tensor", symbols: tuple[str, ...]) -> onnx.ModelProto:
    dynamic = {}
    if symbols:
        sizes = {axis: torch.export.Dim(name, min=2, max=16) for axis, name in enumerate(symbols)}
        dynamic = {"dynamic_shapes": (sizes,)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, (x,), input_names=["x"], output_names=["logits"], dynamo=True, optimize=False,
            verbose=False, **dynamic,
        )  # fmt: skip
    return program.model_proto


def marked(names: "list[str]") -> "list[object]":
    return [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in names]


@pytest.mark.parametrize("name", marked(list(MODULES)))
def test_gradients_of_a_fixed_batch(name: str) -> None:
    check_gradients(name, (), [(2, 6)])


@pytest.mark.parametrize("name", marked(list(SYMBOLIC)))
def test_gradients_of_symbolic_sizes(name: str) -> None:
    symbols = SYMBOLIC[name]
    check_gradients(name, symbols, [(4, 6), (3, 6)] + ([(2, 9)] if len(symbols) > 1 else []))


def check_gradients(name: str, symbols: tuple[str, ...], shapes: "list[tuple[int, int]]") -> None:
    torch.manual_seed(0)
    module = MODULES[name]().eval()
    words = {shape: torch.randint(0, WORDS, shape) for shape in shapes}
    model = exported(module, words[shapes[0]], symbols)
    stored = [tensor.name for tensor in model.graph.initializer]
    parameters = named_in(module, stored)
    step = build_training_graph(
        model,
        loss="softmax_cross_entropy",
        optimizer=SGD(lr=1.0),
        parameters=ParameterChoice(train=tuple(parameters)),
    )
    for x in words.values():
        check_step(module, parameters, step, x)


def named_in(module: "torch.nn.Module", stored: "list[str]") -> "dict[str, torch.nn.Parameter]":
    """Return all parameters by the names that the export has for them: a tied one bears any of its own."""
    tied = dict(module.named_parameters(remove_duplicate=False))
    found = {name: tied[name] for name in stored if name in tied}
    assert {id(value) for value in found.values()} == {id(value) for value in module.parameters()}
    assert len({id(value) for value in found.values()}) == len(found), "a tied table was untied"
    return found


def check_step(
    module: "torch.nn.Module",
    parameters: "dict[str, torch.nn.Parameter]",
    step: onnx.ModelProto,
    x: "torch.Tensor",
) -> None:
    module.zero_grad()
    logits = module(x)
    labels = torch.randint(0, logits.shape[-1], logits.shape[:-1])
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    loss.backward()
    start = {name: value.detach().numpy() for name, value in parameters.items()}

    (found,), after = train(step, [{"x": x.numpy(), "labels": labels.numpy()}])

    np.testing.assert_allclose(found, loss.item(), rtol=1e-5)
    assert after.keys() == parameters.keys()
    largest = max(float(value.grad.abs().max()) for value in parameters.values())
    for name, value in parameters.items():
        # A parameter near 1 loses what is below its last bit: 6e-8.
        np.testing.assert_allclose(
            start[name] - after[name], value.grad.numpy(), rtol=0, atol=RTOL * largest + 2.5e-7, err_msg=name
        )
