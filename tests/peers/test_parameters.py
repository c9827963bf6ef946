"""What `partc grad` trains of torch.onnx's exports, against the modules' own parameters."""

import hashlib

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.adam import LAMB
from partc.compiler.differentiation.updates.optimizers import SGD
from tests.checks.training_steps import facts_of, train
from tests.peers.score_parameters import ParameterScore, Stored, score_parameters

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.peers


class BarlowTwins(torch.nn.Module):
    """Its target, the identity, is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))

    def forward(self, x: "torch.Tensor", y: "torch.Tensor") -> "torch.Tensor":
        a, b = (self.head(view) for view in (x, y))
        correlation = (a - a.mean(0)).T @ (b - b.mean(0)) / len(a)
        return (correlation - torch.eye(8)).square().sum()


class Layers(torch.nn.Module):
    """A recurrent layer, a zero bias, unit scales, a scalar, a buffer, and positions folded to rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, 8)
        self.positions = torch.nn.Embedding(10, 8)
        self.recurrent = torch.nn.LSTM(8, 8, batch_first=True)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 5)
        torch.nn.init.zeros_(self.head.bias)
        self.temperature = torch.nn.Parameter(torch.tensor(0.5))
        self.register_buffer("frequencies", torch.arange(8.0))

    def forward(self, ids: "torch.Tensor") -> "torch.Tensor":
        h = self.words(ids) + self.positions(torch.arange(ids.shape[1])) + self.frequencies
        return (self.head(self.norm(self.recurrent(h)[0])) * self.temperature).square().mean()


class StraightThrough(torch.nn.Module):
    """A quantiser that its gradient passes by: the exporter's optimiser would forget it."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = torch.nn.Linear(12, 8), torch.nn.Linear(8, 12)

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        h = self.encode(x)
        quantised = h + (h.round() - h).detach()
        return (self.decode(quantised) - x).square().mean()


class GPT2(torch.nn.Module):
    """A causal mask of the least float."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, n_positions=8)
        self.model = transformers.GPT2LMHeadModel(config).eval()

    def forward(self, ids: "torch.Tensor") -> "torch.Tensor":
        logits = self.model(ids, use_cache=False, return_dict=False)[0]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def ids() -> "tuple[torch.Tensor, ...]":
    return (torch.randint(0, 20, (4, 6)),)


MODULES = {
    "barlow_twins": (BarlowTwins, lambda: (torch.randn(4, 12), torch.randn(4, 12))),
    "layers": (Layers, ids),
    "gpt2": (GPT2, ids),
}


def exported(
    name: str, *, optimize: bool
) -> "tuple[torch.nn.Module, onnx.ModelProto, dict[str, np.ndarray]]":
    torch.manual_seed(0)
    make, make_inputs = MODULES[name]
    module, inputs = make(), make_inputs()
    names = [f"input_{index}" for index in range(len(inputs))]
    options = {"input_names": names, "output_names": ["loss"], "optimize": optimize}
    program = torch.onnx.export(module, inputs, dynamo=True, verbose=False, **options)
    return module, program.model_proto, dict(zip(names, (i.numpy() for i in inputs), strict=True))


def stored(named: "list[tuple[str, torch.Tensor]]") -> list[Stored]:
    return [
        (name, tuple(value.shape), hashlib.sha256(value.detach().float().numpy().tobytes()).hexdigest())
        for name, value in named
    ]


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_parameters_train_and_constants_do_not(name: str, optimize: bool) -> None:
    module, forward, _ = exported(name, optimize=optimize)
    _, unoptimised, _ = exported(name, optimize=False)
    parameters, buffers = stored(list(module.named_parameters())), stored(list(module.named_buffers()))

    score = score_parameters(forward, "loss", parameters, buffers, unoptimised=unoptimised)

    assert score == ParameterScore(trained=score.trained, constant=score.constant)
    assert score.trained >= len(parameters) / 2  # the exporter merges equal ones
    if not optimize:
        assert score.trained == len(parameters)


def test_the_identity_target_of_barlow_twins_stays() -> None:
    _, forward, _ = exported("barlow_twins", optimize=True)

    step = build_training_graph(forward, loss="loss", optimizer=SGD())

    assert facts_of(step)["gradients"].keys() == {
        "head.0.weight",
        "head.0.bias",
        "head.2.weight",
        "head.2.bias",
    }


def test_gradients_stop_where_the_module_detaches() -> None:
    torch.manual_seed(0)
    module, x = StraightThrough(), torch.randn(4, 12)
    options = {"input_names": ["x"], "output_names": ["loss"], "optimize": False}
    program = torch.onnx.export(module, (x,), dynamo=True, verbose=False, **options)
    step = build_training_graph(program.model_proto, loss="loss", optimizer=SGD(1.0))
    module(x).backward()

    _, after = train(step, [{"x": x.numpy()}])

    for name, value in module.named_parameters():
        start, gradient = value.detach().numpy(), value.grad.numpy()
        np.testing.assert_allclose(start - after[name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)


def test_gpt2_stays_finite_under_lamb() -> None:
    _, forward, feeds = exported("gpt2", optimize=True)
    step = build_training_graph(forward, loss="loss", optimizer=LAMB(0.01))

    _, after = train(step, [feeds] * 5)

    assert all(np.isfinite(value).all() for value in after.values())
