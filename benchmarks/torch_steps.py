"""The three works in PyTorch, eager: forward, backward and update, on one thread or on a GPU in float32.

resnet50   models/resnet.py of this repository (stride in a stage's first 1x1 convolution), momentum
gpt2       GPT-2 small, embeddings tied, attention by scaled_dot_product_attention, AdamW
lm         models/lm.py: one projected LSTM, a sampled softmax, sparse gradients of both tables, Adagrad
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from sizes import GPT2, LM, RESNET50
from torch import nn
from torch.nn import functional

Step = Callable[[Mapping[str, np.ndarray]], float]


def torch_step(work: str, device: str = "cpu") -> Step:
    """Return a function that trains one step on a batch and returns the loss."""
    torch.set_default_device(device)
    torch.backends.cudnn.allow_tf32 = False  # float32, as partc computes
    model = torch_model(work)
    return step_of(model, optimizer_of(work, model), device)


def torch_model(work: str) -> nn.Module:
    """Return a work's model, which takes a batch and returns the loss, with the same weights each time."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return {"resnet50": _resnet50, "gpt2": lambda: Gpt2(GPT2), "lm": SampledLm}[work]()


def optimizer_of(work: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that a work is trained with."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if work == "resnet50":
        return torch.optim.SGD(parameters, lr=RESNET50["lr"], momentum=RESNET50["momentum"])
    if work == "gpt2":
        return torch.optim.AdamW(parameters, lr=GPT2["lr"], weight_decay=GPT2["weight_decay"])
    return torch.optim.Adagrad(parameters, lr=LM["lr"], initial_accumulator_value=0.1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, device: str = "cpu") -> Step:
    """Return a function that trains one step of a model on a batch and returns the loss."""

    def step(batch: Mapping[str, np.ndarray]) -> float:
        optimizer.zero_grad()
        value = model(*(torch.from_numpy(array).to(device) for array in batch.values()))
        value.backward()
        optimizer.step()
        return float(value.detach())

    return step


# ---------------------------------------------------------------- ResNet-50


class Bottleneck(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int, reshapes: bool) -> None:
        super().__init__()
        self.down = _normalised_conv(channels_in, channels, 1, stride)
        self.middle = _normalised_conv(channels, channels, 3, 1)
        self.up = _normalised_conv(channels, 4 * channels, 1, 1)
        self.shortcut = _normalised_conv(channels_in, 4 * channels, 1, stride) if reshapes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.relu(self.middle(functional.relu(self.down(x), inplace=True)), inplace=True)
        return functional.relu(self.up(hidden) + self.shortcut(x), inplace=True)


def _normalised_conv(channels_in: int, channels_out: int, kernel: int, stride: int) -> nn.Module:
    conv = nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels_out))


def _stages(width: int) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    channels_in = width
    for stage, count in enumerate((3, 4, 6, 3)):
        for position in range(count):
            stride = 2 if position == 0 and stage > 0 else 1
            blocks.append(Bottleneck(channels_in, width << stage, stride, position == 0))
            channels_in = 4 * (width << stage)
    return blocks


class WithCrossEntropy(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(x), labels)


def _resnet50() -> nn.Module:
    stem = [_normalised_conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, RESNET50["classes"])]
    return WithCrossEntropy(nn.Sequential(*stem, *_stages(64), *head))


# ---------------------------------------------------------------- GPT-2


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_dense = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(self.before_attention(x))
        return x + self.narrow(functional.gelu(self.widen(self.before_dense(x)), approximate="tanh"))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        # By index: the exporter writes split and chunk as sequences.
        heads = self.queries_keys_values(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, tokens, width))


class Gpt2(nn.Module):
    """Logits of every token but the mean loss over them all: ids and labels [batch, tokens]."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes["vocab"], sizes["width"])
        self.positions = nn.Embedding(sizes["positions"], sizes["width"])
        self.blocks = nn.ModuleList(Block(sizes["width"], sizes["heads"]) for _ in range(sizes["layers"]))
        self.norm = nn.LayerNorm(sizes["width"])
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.norm(hidden) @ self.words.weight.t()
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


# ---------------------------------------------------------------- LSTM language model


class SampledLm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = LM["projection"]
        self.table = nn.Embedding(LM["vocab"], LM["embedding"], sparse=True)
        self.lstm = nn.LSTM(LM["embedding"], LM["cells"], proj_size=width, bias=True)
        with torch.no_grad():  # one bias, and gates that remember at first, as models/lm.py has them
            self.lstm.bias_hh_l0.zero_().requires_grad_(False)
            self.lstm.bias_ih_l0.zero_()[LM["cells"] : 2 * LM["cells"]] = 1.0
        self.classes = nn.Embedding(LM["vocab"], width, sparse=True)
        self.biases = nn.Embedding(LM["vocab"], 1, sparse=True)
        for table in (self.table, self.classes):
            nn.init.uniform_(table.weight, -0.05, 0.05)
        nn.init.zeros_(self.biases.weight)

    def forward(self, words: torch.Tensor, labels: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        hidden = self.lstm(self.table(words.t()))[0].flatten(0, 1)
        labels = labels.t().flatten()
        own = (hidden * self.classes(labels)).sum(1, keepdim=True) + self.biases(labels)
        others = hidden @ self.classes(sampled).t() + self.biases(sampled).t()
        others = others - _log_expected_count(sampled)
        others = others.masked_fill(labels[:, None] == sampled[None], -1e9)
        logits = torch.cat([own - _log_expected_count(labels)[:, None], others], dim=1)
        return -functional.log_softmax(logits, dim=1)[:, 0].mean()


def _log_expected_count(ids: torch.Tensor) -> torch.Tensor:
    rank = ids.double() + 1
    law = torch.log((rank + 1) / rank) / math.log(LM["vocab"] + 1)
    return torch.log(law * LM["samples"]).float()


# ---------------------------------------------------------------- the same weights in partc


def weights_for_partc(work: str) -> dict[str, np.ndarray]:
    """Return a work's first weights by the names that partc's model has for them."""
    model = torch_model(work)
    if work == "gpt2":  # exported: the weights are in the file
        return {}
    if work == "resnet50":
        return _weights_of_resnet50(model)
    lstm = model.lstm
    # PyTorch's gates are i, f, g, o; those of models/lm.py i, g, f, o.
    of_input, recurrent = (_reordered(weight).t() for weight in (lstm.weight_ih_l0, lstm.weight_hh_l0))
    tensors = {
        "embedding": model.table.weight,
        "lstm.input_weight": of_input,
        "lstm.recurrent_weight": recurrent,
        "lstm.projection_weight": lstm.weight_hr_l0.t(),
        "softmax.weight": model.classes.weight,
        "softmax.bias": model.biases.weight[:, 0],
    }
    return {name: tensor.detach().contiguous().numpy() for name, tensor in tensors.items()}


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    i, f, g, o = weight.chunk(4)
    return torch.cat([i, g, f, o])


def _weights_of_resnet50(model: nn.Module) -> dict[str, np.ndarray]:
    blocks = [f"stage{stage}.{n}" for stage, count in enumerate((3, 4, 6, 3)) for n in range(count)]
    convolutions = ["stem"]
    for block in blocks:
        convolutions += [f"{block}.{part}" for part in ("down", "middle", "up")]
        convolutions += [f"{block}.shortcut"] if block.endswith(".0") else []
    names = [f"{layer}.{part}" for layer in convolutions for part in ("weight", "scale", "shift")]
    *of_layers, dense, bias = (parameter.detach().numpy() for parameter in model.parameters())
    weights = dict(zip(names, of_layers, strict=True))
    return weights | {"head.weight": np.ascontiguousarray(dense.T), "head.bias": bias}


# ---------------------------------------------------------------- export


def export_gpt2(path: str, batch: Sequence[np.ndarray]) -> None:
    """Write GPT-2's forward graph and its loss."""
    torch.manual_seed(0)
    example = tuple(torch.from_numpy(array) for array in batch)
    names = {"input_names": ["ids", "labels"], "output_names": ["loss"]}
    # Unoptimised: the exporter's optimiser stores a tied table twice, once transposed.
    torch.onnx.export(Gpt2(GPT2), example, path, dynamo=True, opset_version=20, optimize=False, **names)
