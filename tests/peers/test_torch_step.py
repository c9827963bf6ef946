"""partc.torch: steps of PyTorch as ONNX, equal to PyTorch's own, and trained on four ranks."""

from pathlib import Path
from typing import Any

import pytest

import partc
from partc.compiler.importing.import_training import import_training_graph
from partc.runtime.errors import BadUsage, UnsupportedModel
from tests.builders.plans.compiled_steps import (
    assert_trains_as_one_device,
    compile_step,
    random_batches,
    verified,
)

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.peers

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from partc.compiler.importing.torch_step import compare_steps  # noqa: E402

BATCH, WORDS, CLASSES = 8, 20, 5


def image_net() -> "nn.Module":
    """Convolutions with stride, groups and dilation, batch normalisation, both kinds of pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(6, CLASSES),
    )


class TextNet(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, tokens: "torch.Tensor") -> "torch.Tensor":
        return self.out(
            functional.gelu(self.dropout(self.norm(self.embedding(tokens))), approximate="tanh")
        ).mean(1)


def cross_entropy(model: "nn.Module", x: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
    return functional.cross_entropy(model(x), labels)


def inputs_of(kind: str) -> tuple["torch.Tensor", "torch.Tensor"]:
    torch.manual_seed(0)
    labels = torch.randint(0, CLASSES, (BATCH,))
    if kind == "image":
        return torch.randn(BATCH, 3, 8, 8), labels
    return torch.randint(0, WORDS, (BATCH, 6)), labels


@pytest.mark.parametrize(
    ("kind", "optimizer", "options"),
    [
        ("image", "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("image", "AdamW", {"lr": 0.01}),
        ("text", "Adam", {"lr": 0.01}),
        ("text", "NAdam", {"lr": 0.01, "weight_decay": 0.1}),
        ("text", "Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
        pytest.param("text", "RMSprop", {"lr": 0.01, "momentum": 0.5}, marks=pytest.mark.long),
    ],
)
def test_exported_steps_equal_pytorchs(tmp_path: Path, kind: str, optimizer: str, options: dict) -> None:
    torch.manual_seed(0)  # whatever ran before
    module = image_net() if kind == "image" else TextNet()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    made = getattr(torch.optim, optimizer)(module.parameters(), **options)

    partc.torch.export_step(module, cross_entropy, made, inputs_of(kind), tmp_path / "train.onnx")

    training = import_training_graph(tmp_path / "train.onnx")
    assert set(training.gradients) == {name for name, _ in module.named_parameters()}
    assert [name for name, gradient in training.gradients.items() if gradient.is_sparse] == (
        [] if kind == "image" else ["embedding.weight"]
    )
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("default", ["float32", "float64"])
def test_steps_in_float64_equal_pytorchs_to_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: str
) -> None:
    """PyTorch counts steps in its default type."""
    monkeypatch.setitem(compare_steps.RTOL, torch.float64, 1e-12)
    activations = (nn.LeakyReLU(0.1), nn.ELU(0.7), nn.Hardtanh(-0.3, 0.7))
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), *activations, nn.Linear(6, CLASSES)).double()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.0123456789, amsgrad=True, weight_decay=0.1)
    images, labels = inputs_of("image")

    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, default))
    try:
        partc.torch.export_step(
            module, cross_entropy, optimizer, (images.double(), labels), tmp_path / "train.onnx"
        )
    finally:
        torch.set_default_dtype(before)


def test_four_ranks_train_an_exported_step_as_one_device(tmp_path: Path) -> None:
    module = TextNet().double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    partc.torch.export_step(module, cross_entropy, optimizer, inputs_of("text"), tmp_path / "train.onnx")

    training = import_training_graph(tmp_path / "train.onnx")
    compiled = compile_step(training, tmp_path / "out", "2x2", "hybrid", "global")

    assert_trains_as_one_device(compiled, random_batches(compiled.plan, steps=3))


@pytest.mark.parametrize("batch", ["per-replica", "global"])
def test_four_ranks_train_an_exported_step_with_dropout_as_one_device(tmp_path: Path, batch: str) -> None:
    """The exporter compares the step with PyTorch's, under the masks that PyTorch drew."""
    module = TextNet(dropout=0.5).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    partc.torch.export_step(module, cross_entropy, optimizer, inputs_of("text"), tmp_path / "train.onnx")

    training = import_training_graph(tmp_path / "train.onnx")
    compiled = compile_step(training, tmp_path / "out", "2x2", "hybrid", batch)

    assert [drawn.sample_axis for drawn in compiled.plan.drawn_inputs] == [0]
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, steps=3))


class Attention(nn.Module):
    """Of one head, with the four dropouts of a transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.queries, self.values = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        weights = torch.softmax(self.queries(x) @ self.keys(x).transpose(1, 2) / 8**0.5, -1)
        x = x + _drop(_drop(weights) @ self.values(x))
        return x + _drop(self.outer(_drop(torch.relu(self.inner(x)))))


def _drop(x: "torch.Tensor") -> "torch.Tensor":
    return nn.functional.dropout(x, 0.3)


def test_attention_drops_what_pytorch_drops(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Embedding(WORDS, 8), Attention(), nn.Flatten(), nn.Linear(48, CLASSES)).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    partc.torch.export_step(module, cross_entropy, optimizer, inputs_of("text"), tmp_path / "train.onnx")

    training = import_training_graph(tmp_path / "train.onnx")
    compiled = compile_step(training, tmp_path / "out", "1x2", "allreduce", "global")
    assert len(compiled.plan.drawn_inputs) == 4
    assert_trains_as_one_device(compiled, random_batches(compiled.plan, steps=2))


class FirstAndLast(nn.Module):
    """Views that functionalisation turns into copies: select and slice."""

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        return torch.cat([x[:, 0], x[:, 1:3].mean(1), x[:, -1]], dim=1)


def encoder() -> "nn.Module":
    """PyTorch's own attention, which it computes in one op."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(WORDS, 8), layer, nn.Flatten(), nn.Linear(48, CLASSES))


def test_views_group_normalisation_and_attention_are_exported(tmp_path: Path) -> None:
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, CLASSES))
    views = nn.Sequential(nn.Embedding(WORDS, 4), FirstAndLast(), nn.Linear(12, CLASSES))
    for kind, module in (("text", views), ("image", images), ("text", encoder())):
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        path = tmp_path / "train.onnx"

        partc.torch.export_step(module, cross_entropy, optimizer, inputs_of(kind), path)

        assert set(import_training_graph(path).gradients) == {name for name, _ in module.named_parameters()}


def test_an_optimizer_that_reads_its_counts_as_numbers_is_refused(tmp_path: Path) -> None:
    module = TextNet()
    optimizer = torch.optim.Adamax(module.parameters(), lr=0.1)

    with pytest.raises(
        UnsupportedModel, match=r"(?s)Adamax.step.*fix: use an optimizer that counts in tensors"
    ):
        partc.torch.export_step(module, cross_entropy, optimizer, inputs_of("text"), tmp_path / "train.onnx")


def test_an_optimizer_that_cannot_be_exported_is_blamed_and_not_the_module(tmp_path: Path) -> None:
    module = TextNet()
    optimizer = torch.optim.Rprop(module.parameters())

    with pytest.raises(UnsupportedModel, match=r"(?s)aten.clamp.*Rprop.step.*fix: use another optimizer"):
        partc.torch.export_step(module, cross_entropy, optimizer, inputs_of("text"), tmp_path / "train.onnx")


def test_a_loss_that_reads_a_value_as_a_number_is_refused_and_not_the_optimizer(tmp_path: Path) -> None:
    module = TextNet()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)

    def scaled(model: "nn.Module", x: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        value = cross_entropy(model, x, labels)
        return value / value.item()

    with pytest.raises(UnsupportedModel, match=r"(?s)export_step, the loss.*fix: use tensor ops"):
        partc.torch.export_step(module, scaled, optimizer, inputs_of("text"), tmp_path / "train.onnx")


@pytest.mark.parametrize(
    ("optimizer", "options"), [("LBFGS", {}), ("SparseAdam", {}), ("Adam", {"capturable": True})]
)
def test_an_optimizer_that_takes_no_step_is_refused(tmp_path: Path, optimizer: str, options: dict) -> None:
    module = TextNet()
    made = getattr(torch.optim, optimizer)(module.parameters(), **options)

    with pytest.raises(UnsupportedModel, match=rf"(?s){optimizer} takes no step.*{optimizer}.step.*fix: use"):
        partc.torch.export_step(module, cross_entropy, made, inputs_of("text"), tmp_path / "train.onnx")


def test_a_step_that_onnx_runtime_has_no_kernel_for_is_refused(tmp_path: Path) -> None:
    from partc.torch import export_step

    module = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, CLASSES)).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inputs = torch.ones(3, 4, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)

    with pytest.raises(UnsupportedModel, match=r"(?s)Erf.*fix: export the module.*in float32"):
        export_step(module, cross_entropy, optimizer, inputs, tmp_path / "train.onnx")


def test_an_optimizer_with_a_first_step_of_its_own_is_exported_behind_that(tmp_path: Path) -> None:
    module, inputs = TextNet(), inputs_of("text")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    with pytest.raises(UnsupportedModel, match=r"(?s)first step of SGD.*fix: take one step.*dampening"):
        partc.torch.export_step(module, cross_entropy, optimizer, inputs, tmp_path / "train.onnx")

    cross_entropy(module, *inputs).backward()
    optimizer.step()
    partc.torch.export_step(module, cross_entropy, optimizer, inputs, tmp_path / "train.onnx")


def test_a_loss_may_take_a_gradient_with_torch_func(tmp_path: Path) -> None:
    """As a gradient penalty does. With torch.autograd it is refused."""

    def penalised(model: "nn.Module", x: "torch.Tensor") -> "torch.Tensor":
        slopes = torch.func.grad(lambda x: model(x).sum())(x)
        return model(x).mean() + ((slopes.norm(dim=1) - 1) ** 2).mean()

    def untraced(model: "nn.Module", x: "torch.Tensor") -> "torch.Tensor":
        x = x.clone().requires_grad_()
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().mean()

    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
    x = torch.randn(BATCH, 6, dtype=torch.float64)

    partc.torch.export_step(critic, penalised, optimizer, (x,), tmp_path / "train.onnx")

    training = import_training_graph(tmp_path / "train.onnx")
    compiled = compile_step(training, tmp_path / "out", "1x2", "allreduce", "global")
    report = verified(compiled, random_batches(compiled.plan, steps=2))
    assert report.passed, report.summary()
    with pytest.raises(UnsupportedModel, match=r"torch.autograd(?s:.)*fix: take it with torch.func"):
        partc.torch.export_step(critic, untraced, optimizer, (x,), tmp_path / "train.onnx")


class Sampling(nn.Module):
    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        return x * torch.poisson(torch.ones_like(x))


def test_draws_that_cannot_be_followed_are_refused(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, CLASSES), Sampling())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    with pytest.raises(UnsupportedModel, match=r"(?s)poisson.*fix: write the module with ops"):
        partc.torch.export_step(module, cross_entropy, optimizer, inputs_of("image"), tmp_path / "train.onnx")


@pytest.mark.parametrize(
    ("draw", "told"),
    [
        (lambda x: torch.bernoulli(torch.full_like(x, 0.5)), "draws with aten.bernoulli.default"),
        (lambda x: torch.normal(0.0, 1.0, x.shape), "draws with aten.normal"),
        (lambda x: torch.randint(0, 2, x.shape), "draws with aten.randint"),
    ],
)
def test_a_draw_that_cannot_be_followed_is_named(tmp_path: Path, draw: object, told: str) -> None:
    module = nn.Linear(4, CLASSES)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inputs = (torch.randn(BATCH, 4), torch.randint(0, CLASSES, (BATCH,)))

    def noisy(model: "nn.Module", x: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
        return functional.cross_entropy(model(x * draw(x)), labels)

    with pytest.raises(UnsupportedModel, match=rf"{told}(?s:.)*fix: draw with nn.Dropout"):
        partc.torch.export_step(module, noisy, optimizer, inputs, tmp_path / "train.onnx")


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(4, CLASSES)
    inputs = (torch.randn(BATCH, 4), torch.randint(0, CLASSES, (BATCH,)))
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)

    with pytest.raises(BadUsage, match=r"(?s)SGD changes no parameter.*torch.optim.SGD\(module.parameters"):
        partc.torch.export_step(module, cross_entropy, foreign, inputs, tmp_path / "train.onnx")
    own = torch.optim.SGD(module.requires_grad_(False).parameters(), 0.1)
    with pytest.raises(BadUsage, match="let some of them require a gradient"):
        partc.torch.export_step(module, cross_entropy, own, inputs, tmp_path / "train.onnx")


def test_inputs_that_the_loss_does_not_name_are_refused(tmp_path: Path) -> None:
    module = TextNet()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    with pytest.raises(BadUsage, match="fix: give one example input for each argument"):
        partc.torch.export_step(module, cross_entropy, optimizer, inputs_of("text")[:1], tmp_path / "t.onnx")


class SquaredError(nn.Module):
    def forward(self, model: "nn.Module", x: "torch.Tensor", target: "torch.Tensor") -> "torch.Tensor":
        return functional.mse_loss(model(x), target)


def squared_error(model: "nn.Module", *inputs: "torch.Tensor") -> "torch.Tensor":
    return functional.mse_loss(model(inputs[0]), inputs[1])


def of_everything(*given: Any) -> "torch.Tensor":
    return squared_error(*given)


def weighted(model: "nn.Module", x: "torch.Tensor", y: "torch.Tensor", share: float = 0.5) -> "torch.Tensor":
    return share * functional.mse_loss(model(x), y)


def called_alike(model: "nn.Module", x_0: "torch.Tensor", *x: "torch.Tensor") -> "torch.Tensor":
    return squared_error(model, x_0, *x)


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (SquaredError(), ["x", "target"]),
        (squared_error, ["inputs_0", "inputs_1"]),
        (of_everything, ["given_0", "given_1"]),
        (weighted, ["x", "y"]),
    ],
)
def test_a_loss_may_be_a_module_or_take_any_number_of_inputs(
    tmp_path: Path, loss: object, names: list[str]
) -> None:
    module = nn.Linear(4, CLASSES)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inputs = (torch.randn(BATCH, 4), torch.randn(BATCH, CLASSES))

    model = partc.torch.export_step(module, loss, optimizer, inputs, tmp_path / "train.onnx")

    assert list(import_training_graph(model).data_inputs) == names


def test_two_inputs_of_one_name_are_refused(tmp_path: Path) -> None:
    module = nn.Linear(4, CLASSES)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inputs = (torch.randn(BATCH, 4), torch.randn(BATCH, CLASSES))

    with pytest.raises(BadUsage, match=r"(?s)two inputs of the loss would be called x_0.*fix: call"):
        partc.torch.export_step(module, called_alike, optimizer, inputs, tmp_path / "train.onnx")
