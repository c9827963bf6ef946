"""Recurrent networks, convolutions over time, and a Transformer of PyTorch's own layers."""

import torch
from torch import nn
from torch.nn import functional

from tests.peers.zoo.model import BATCH, Draw, Model, integers, normal

WORDS, TOKENS, CLASSES = 40, 7, 5


class Recurrent(nn.Module):
    """An embedding, a recurrent layer of PyTorch, and a classifier of its last output."""

    def __init__(self, kind: type[nn.RNNBase], both_ways: bool = False, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.layer = kind(8, 16, num_layers=layers, batch_first=True, bidirectional=both_ways)
        self.out = nn.Linear(32 if both_ways else 16, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.embedding(words))[0][:, -1])


class Unrolled(nn.Module):
    """A cell called once a step, in Python."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.out = cell, nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 16)
        cell = torch.zeros_like(state)
        for step in range(x.shape[1]):
            if isinstance(self.cell, nn.LSTMCell):
                state, cell = self.cell(x[:, step], (state, cell))
            else:
                state = self.cell(x[:, step], state)
        return self.out(state)


class TimeMajor(nn.Module):
    """A GRU whose data has time first, as PyTorch's recurrent layers do unless asked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.GRU(8, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.out(self.layer(x)[0][-1]), labels)


class Forecast(nn.Module):
    """An LSTM that predicts every next value, under a squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(3, 16, num_layers=2, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.out(self.layer(x[:, :-1])[0]), x[:, 1:])


class CausalConvolution(nn.Module):
    """A block of a temporal convolutional network: weight norm, dilation, a residual."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.convolution = nn.utils.parametrizations.weight_norm(
            nn.Conv1d(channels, channels, 3, dilation=dilation)
        )
        self.padding = 2 * dilation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.convolution(functional.pad(x, (self.padding, 0))))


def tcn() -> nn.Module:
    blocks = [CausalConvolution(8, dilation) for dilation in (1, 2, 4)]
    return nn.Sequential(
        nn.Conv1d(3, 8, 1), *blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )


class Translator(nn.Module):
    """nn.Transformer, sinusoidal positions, a causal mask made in forward, a cross entropy over all words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.layers = nn.Transformer(16, 2, 1, 1, 24, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, WORDS)
        angles = torch.arange(TOKENS)[:, None] / 100 ** (torch.arange(8) / 8)
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], 1))

    def forward(self, source: torch.Tensor, target: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)
        hidden = self.layers(self._embed(source), self._embed(target), tgt_mask=mask, tgt_is_causal=True)
        return functional.cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten())

    def _embed(self, words: torch.Tensor) -> torch.Tensor:
        return self.embedding(words) * 4 + self.positions


class Encoder(nn.Module):
    """nn.TransformerEncoder over words of which some are padding, with learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)  # TorchScript's export would not tell of a padding_idx
        self.positions = nn.Parameter(0.02 * torch.randn(1, TOKENS, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.out = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(16, CLASSES),
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.embedding(words) + self.positions, src_key_padding_mask=words == 0)
        return self.out(hidden.mean(1))


class TiedLanguageModel(nn.Module):
    """An LSTM whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(WORDS, 16), nn.LSTM(16, 16, batch_first=True)
        self.out = nn.Linear(16, WORDS)
        self.out.weight = self.embedding.weight

    def forward(self, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.out(self.layer(self.embedding(words))[0])
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def time_first(high: int) -> Draw:
    return lambda generator: torch.randn(TOKENS, high, 8, generator=generator)


words = integers(WORDS, TOKENS)
FAMILY = "recurrent and sequences"
ENTROPY = "softmax_cross_entropy"
MODELS = [
    Model("gru", FAMILY, lambda: Recurrent(nn.GRU), {"words": words}, ENTROPY),
    Model("lstm", FAMILY, lambda: Recurrent(nn.LSTM), {"words": words}, ENTROPY),
    Model(
        "lstm_both_ways",
        FAMILY,
        lambda: Recurrent(nn.LSTM, both_ways=True, layers=2),
        {"words": words},
        ENTROPY,
    ),
    Model("gru_both_ways", FAMILY, lambda: Recurrent(nn.GRU, both_ways=True), {"words": words}, ENTROPY),
    Model("rnn", FAMILY, lambda: Recurrent(nn.RNN), {"words": words}, ENTROPY),
    Model(
        "gru_time_first",
        FAMILY,
        TimeMajor,
        {"x": time_first(BATCH), "labels": integers(CLASSES)},
        axes={"x": 1},
    ),
    Model("lstm_forecast", FAMILY, Forecast, {"x": normal(TOKENS, 3)}),
    Model(
        "gru_cell_unrolled", FAMILY, lambda: Unrolled(nn.GRUCell(3, 16)), {"x": normal(TOKENS, 3)}, ENTROPY
    ),
    Model(
        "lstm_cell_unrolled", FAMILY, lambda: Unrolled(nn.LSTMCell(3, 16)), {"x": normal(TOKENS, 3)}, ENTROPY
    ),
    Model("tcn", FAMILY, tcn, {"x": normal(3, 20)}, ENTROPY),
    Model("transformer", FAMILY, Translator, {"source": words, "target": words, "labels": words}),
    Model("transformer_encoder", FAMILY, Encoder, {"words": words}, ENTROPY),
    Model("tied_lstm", FAMILY, TiedLanguageModel, {"words": words, "labels": words}),
]
