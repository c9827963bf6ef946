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
    torch.set_num_threads(1)
    torch.set_default_device(device)
    torch.backends.cudnn.allow_tf32 = False  # float32, as partc computes
    torch.manual_seed(0)
    loss, optimizer = {"resnet50": _resnet50, "gpt2": _gpt2, "lm": _lm}[work]()

    def step(batch: Mapping[str, np.ndarray]) -> float:
        optimizer.zero_grad()
        value = loss(*(torch.from_numpy(array).to(device) for array in batch.values()))
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


def _resnet50() -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    stem = [_normalised_conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, RESNET50["classes"])]
    model = nn.Sequential(*stem, *_stages(64), *head)
    optimizer = torch.optim.SGD(model.parameters(), lr=RESNET50["lr"], momentum=RESNET50["momentum"])
    return lambda x, labels: functional.cross_entropy(model(x), labels), optimizer


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


def _gpt2() -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    model = Gpt2(GPT2)
    return model, torch.optim.AdamW(model.parameters(), lr=GPT2["lr"], weight_decay=GPT2["weight_decay"])


# ---------------------------------------------------------------- LSTM language model


class SampledLm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = LM["projection"]
        self.table = nn.Embedding(LM["vocab"], LM["embedding"], sparse=True)
        self.lstm = nn.LSTM(LM["embedding"], LM["cells"], proj_size=width, bias=True)
        self.classes = nn.Embedding(LM["vocab"], width, sparse=True)
        self.biases = nn.Embedding(LM["vocab"], 1, sparse=True)
        for table in (self.table, self.classes, self.biases):
            nn.init.uniform_(table.weight, -0.05, 0.05)

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


def _lm() -> tuple[Callable[..., torch.Tensor], torch.optim.Optimizer]:
    model = SampledLm()
    return model, torch.optim.Adagrad(model.parameters(), lr=LM["lr"])


# ---------------------------------------------------------------- export


def export_gpt2(path: str, batch: Sequence[np.ndarray]) -> None:
    """Write GPT-2's forward graph and its loss."""
    torch.manual_seed(0)
    example = tuple(torch.from_numpy(array) for array in batch)
    names = {"input_names": ["ids", "labels"], "output_names": ["loss"]}
    # Unoptimised: the exporter's optimiser stores a tied table twice, once transposed.
    torch.onnx.export(Gpt2(GPT2), example, path, dynamo=True, opset_version=20, optimize=False, **names)
