"""Exports as people make them, under named strategies: losses and parameters of PyTorch's own steps.

Parameters are those that modules begin with: zero biases and equal scales, which both exporters merge or
drop, and tied tables, which they store twice.
"""

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.passes.graph.training_graph import StoredTensor, TrainingGraph
from partc.runtime.errors import UnsupportedModel
from partc.runtime.execution.in_process import train_in_process
from tests.builders.plans.compiled_steps import compile_step

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.peers

from torch.nn import functional  # noqa: E402

from tests.peers.test_named_strategies import bert, t5  # noqa: E402

SAMPLES, TOKENS, WORDS, CLASSES, STEPS, RATE = 8, 6, 50, 5, 3, 0.2
RTOL, ROUNDING = 1e-4, 1e-6  # of a loss; of a parameter, beside 1e-3 of its largest change


class Convolutions(torch.nn.Module):
    """Down by strides and pooling, up by a transposed convolution, joined, classified; its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Conv2d(3, 8, 3, 1, 1), torch.nn.Conv2d(8, 16, 3, 2, 1)
        self.norm, self.up = torch.nn.GroupNorm(4, 16), torch.nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.out = torch.nn.Linear(16 * 4 * 4, CLASSES)
        for layer in (self.one, self.two, self.up, self.out):
            torch.nn.init.zeros_(layer.bias)

    def forward(self, images: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        one = torch.relu(self.one(images))
        two = torch.relu(self.norm(self.two(one)))
        joined = torch.cat([one, self.up(two)], 1)
        pooled = functional.avg_pool2d(functional.max_pool2d(joined, 2), 2)
        return functional.cross_entropy(self.out(pooled.flatten(1)), labels)


class Normalised(torch.nn.Module):
    """Batch normalisations of a module in training, behind convolutions and a dense layer; its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.Conv2d(8, 8, 3, 2)
        self.norm1, self.norm2 = torch.nn.BatchNorm2d(8, momentum=0.3), torch.nn.BatchNorm2d(8)
        self.out, self.norm3 = (
            torch.nn.Linear(8 * 6 * 6, CLASSES),
            torch.nn.BatchNorm1d(CLASSES, affine=False),
        )

    def forward(self, images: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        one = torch.relu(self.norm1(self.one(images)))
        two = torch.relu(self.norm2(self.two(one)))
        return functional.cross_entropy(self.norm3(self.out(two.flatten(1))), labels)


class Recurrence(torch.nn.Module):
    """An encoder of torch.nn's copied layers behind an LSTM, and a decoder tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, 16)
        self.lstm = torch.nn.LSTM(16, 16, batch_first=True)
        layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = torch.nn.Linear(16, WORDS)
        self.out.weight = self.embedding.weight

    def forward(self, words: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        hidden = self.encoder(self.lstm(self.embedding(words))[0])
        return functional.cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten())


class Padded(torch.nn.Module):
    """A table whose row 0 stands for nothing, and is not trained; its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, 16, padding_idx=0)
        self.hidden, self.out = torch.nn.Linear(16, 24), torch.nn.Linear(24, WORDS)
        with torch.no_grad():
            self.embedding.weight[0] = 0.5

    def forward(self, words: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        scores = self.out(torch.tanh(self.hidden(self.embedding(words))))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Spectral(torch.nn.Module):
    """Weights over what a power iteration finds, a step of it with each of training; its own loss."""

    def __init__(self) -> None:
        super().__init__()
        spectral_norm = torch.nn.utils.parametrizations.spectral_norm
        self.embedding = torch.nn.Embedding(WORDS, 16)
        self.hidden, self.out = (
            spectral_norm(torch.nn.Linear(16, 24)),
            spectral_norm(torch.nn.Linear(24, WORDS)),
        )

    def forward(self, words: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        scores = self.out(torch.tanh(self.hidden(self.embedding(words))))
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


MODELS: dict[str, Callable[[], "torch.nn.Module"]] = {
    "bert": bert,
    "t5": t5,
    "convolutions": Convolutions,
    "recurrence": Recurrence,
    "normalised": Normalised,
    "padded": Padded,
    "spectral": Spectral,
}
EXPORTS: dict[str, dict[str, object]] = {
    "dynamo": {"dynamo": True, "verbose": False},
    "dynamo, raw": {"dynamo": True, "optimize": False, "verbose": False},
    "torchscript": {"dynamo": False},
    "torchscript, raw": {
        "dynamo": False, "do_constant_folding": False, "training": torch.onnx.TrainingMode.PRESERVE,
    },
}  # fmt: skip
NAMES = {
    "tensor=2": "1x2",
    "tensor=4": "1x4",
    "fsdp": "2x2",
    "pipeline=2,microbatches=2": "1x2",
    "layerwise": "2x2",
    "replicas=2": "2x2",
    "allreduce": "2x2",
    "ps": "2x2",
    "hybrid": "2x2",
    "spatial=2": "1x2",
}
# In make test-peers; the others are marked long.
SAMPLED = {
    ("bert", "torchscript", "tensor=2"),
    ("t5", "dynamo, raw", "fsdp"),
    ("convolutions", "torchscript", "spatial=2"),
    ("recurrence", "torchscript", "pipeline=2,microbatches=2"),
    ("recurrence", "dynamo", "ps"),
    ("normalised", "dynamo, raw", "hybrid"),
    ("normalised", "torchscript, raw", "tensor=2"),
    ("padded", "dynamo", "hybrid"),
    ("padded", "dynamo, raw", "tensor=4"),
    ("spectral", "dynamo, raw", "fsdp"),
    ("spectral", "dynamo, raw", "pipeline=2,microbatches=2"),
}
# Exports that fold rows of a table to what is repeated for every sample or pair: which is asked about.
ASKED = {("t5", "dynamo"), ("bert", "dynamo")}
# Exports that fold batch normalisations into the layers before them.
FOLDED = {("normalised", "dynamo"), ("normalised", "torchscript")}
# Exports that do not tell what is not trained, or are none.
UNTOLD = {(name, exporter) for name in ("padded", "spectral") for exporter in EXPORTS if "torch" in exporter}
UNTOLD |= {("spectral", "dynamo")}
TRAINING = ("normalised", "spectral")
IMAGES = ("convolutions", "normalised")
CASES = [
    pytest.param(*case, marks=() if case in SAMPLED else pytest.mark.long)
    for case in ((m, e, n) for m in MODELS for e in EXPORTS for n in NAMES)
    if (case[0] in IMAGES) >= (case[2] == "spatial=2")
    if case[:2] not in ASKED | FOLDED | UNTOLD
]


def module_of(name: str) -> "torch.nn.Module":
    torch.manual_seed(0)
    return MODELS[name]().train(name in TRAINING)


def data(name: str) -> dict[str, "torch.Tensor"]:
    generator = torch.Generator().manual_seed(0)
    if name in IMAGES:
        labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        return {"images": torch.randn(SAMPLES, 3, 16, 16, generator=generator), "labels": labels}
    names = ("input_ids", "decoder_input_ids", "labels") if name == "t5" else ("input_ids", "labels")
    drawn = {n: torch.randint(1, WORDS, (SAMPLES, TOKENS), generator=generator) for n in names}
    if name == "padded":
        drawn["input_ids"][:, -2:] = 0
    return drawn


@contextmanager
def plain_attention() -> Iterator[None]:
    """Keep PyTorch from one fused operator for a whole encoder layer, which TorchScript does not export."""
    torch.backends.mha.set_fastpath_enabled(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.backends.mha.set_fastpath_enabled(True)


@cache
def training_step(name: str, exporter: str) -> bytes:
    inputs, options = data(name), EXPORTS[exporter]
    names = {"input_names": list(inputs), "output_names": ["loss"]}
    with plain_attention():
        if options["dynamo"]:
            forward = torch.onnx.export(
                module_of(name), tuple(inputs.values()), **names, **options
            ).model_proto
        else:
            file = io.BytesIO()
            torch.onnx.export(module_of(name), tuple(inputs.values()), file, **names, **options)
            forward = onnx.load_model_from_string(file.getvalue())
    return build_training_graph(forward, loss="loss", optimizer=SGD(lr=RATE)).SerializeToString()


@cache
def steps_of_pytorch(name: str) -> tuple[list[float], dict[str, np.ndarray], dict[str, float]]:
    """Return the losses, the parameters after all steps, and the largest change of each."""
    module = module_of(name)
    start = {key: value.detach().clone() for key, value in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = module(*data(name).values())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = {key: value.detach() for key, value in module.named_parameters()}
    changes = {key: float((value - start[key]).abs().max()) for key, value in after.items()}
    return losses, {key: value.numpy() for key, value in after.items()}, changes


def variables_of(name: str, training: TrainingGraph) -> dict[str, tuple[str, bool]]:
    """Return the variable of each parameter, and whether it is transposed: by its name, or its first value.

    An exporter that transposes a Linear's weight names it anew.
    """
    parameters = {key: value.detach().numpy() for key, value in module_of(name).named_parameters()}
    first = {
        key: variable.initial.load()
        for key, variable in training.variables.items()
        if isinstance(variable.initial, StoredTensor)
    }
    found = {
        key: (key, False)
        for key, value in parameters.items()
        if key in first and first[key].shape == value.shape
    }
    for key in parameters.keys() - found.keys():
        for is_transposed, value in ((False, parameters[key]), (True, parameters[key].T)):
            alike = [other for other, array in first.items() if np.array_equal(array, value)]
            if len(alike) == 1 and np.ptp(value) > 0:
                found[key] = (alike[0], is_transposed)
    return found


@pytest.mark.parametrize(("name", "exporter", "strategy"), CASES)
def test_steps_are_pytorchs(name: str, exporter: str, strategy: str, tmp_path: Path) -> None:
    expected, after, changes = steps_of_pytorch(name)
    training = import_training_graph(onnx.load_model_from_string(training_step(name, exporter)))
    compiled = compile_step(training, tmp_path / "out", NAMES[strategy], strategy, "global")
    batch = {key: value.numpy() for key, value in data(name).items()}

    result = train_in_process(compiled.folder, [batch] * STEPS)

    np.testing.assert_allclose([float(out["loss"]) for out in result.outputs], expected, rtol=RTOL)
    held = variables_of(name, training)
    # Of others the losses tell: cells that are stacked, layers that were copied, scales that are merged.
    assert len(held) > 0.6 * len(after)
    for key, (variable, is_transposed) in held.items():
        value = result.variables[variable]
        np.testing.assert_allclose(
            value.T if is_transposed else value, after[key], rtol=0,
            atol=1e-3 * changes[key] + ROUNDING, err_msg=key,
        )  # fmt: skip


def test_a_folded_batch_normalisation_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="folded a batch normalisation"):
        training_step("normalised", "dynamo")
