"""Hand-written networks: U-Net, mixtures of experts, norms, spectra, and losses with weights."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.peers.zoo.model import BATCH, Model, integers, normal, uniform

CLASSES = 5


class UNet(nn.Module):
    """Two levels down and up, with skips, a class for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _two_convolutions(3, 8), _two_convolutions(8, 16)
        self.up, self.third = nn.ConvTranspose2d(16, 8, 2, 2), _two_convolutions(16, 8)
        self.out = nn.Conv2d(8, CLASSES, 1)

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wide = self.first(image)
        deep = self.second(functional.max_pool2d(wide, 2))
        scores = self.out(self.third(torch.cat([wide, self.up(deep)], 1)))
        return functional.cross_entropy(scores, labels)


def _two_convolutions(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        nn.BatchNorm2d(after),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )


class SoftExperts(nn.Module):
    """A mixture of experts, all of them computed, mixed by a softmax; a loss that balances them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, CLASSES)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        results = torch.stack([expert(x) for expert in self.experts], 1)
        balance = weights.mean(0).square().sum()
        return functional.cross_entropy((weights[:, :, None] * results).sum(1), labels) + 0.01 * balance


class TopExperts(nn.Module):
    """Two experts of four for each sample, their weights gathered from one stacked parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.inner, self.outer = (
            nn.Parameter(0.2 * torch.randn(4, 16, 24)),
            nn.Parameter(0.2 * torch.randn(4, 24, CLASSES)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).topk(2)
        hidden = torch.relu(torch.einsum("bi,bkio->bko", x, self.inner[chosen]))
        results = torch.einsum("bki,bkio->bko", hidden, self.outer[chosen])
        return (weight.softmax(-1)[:, :, None] * results).sum(1)


class SwitchExperts(nn.Module):
    """One expert a sample: rows are dispatched by a mask, as in the Switch Transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(16, 3), nn.Linear(16, CLASSES)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probability, chosen = self.gate(x).softmax(-1).max(-1)
        mixed = sum(
            torch.where((chosen == index)[:, None], expert(x), 0.0)
            for index, expert in enumerate(self.experts)
        )
        return self.out(x + probability[:, None] * mixed)


class Mixer(nn.Module):
    """MLP-Mixer: over patches, then over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.tokens = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.out = nn.Linear(16, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norms[1](x))
        return self.out(self.norms[2](x).mean(1))


class RadianceField(nn.Module):
    """A NeRF's network: sines of coordinates at fixed frequencies, a skip, colour and density."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(4))
        self.first, self.second, self.out = nn.Linear(27, 24), nn.Linear(51, 24), nn.Linear(24, 4)

    def forward(self, point: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
        angles = (point[:, :, None] * self.frequencies).flatten(1)
        encoded = torch.cat([point, angles.sin(), angles.cos()], 1)
        hidden = torch.relu(self.second(torch.cat([torch.relu(self.first(encoded)), encoded], 1)))
        rgb, density = self.out(hidden).split([3, 1], 1)
        return functional.mse_loss(rgb.sigmoid() * (1 - torch.exp(-functional.softplus(density))), colour)


class Spectral(nn.Module):
    """A Fourier neural operator: a learned filter on the real transform of a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(9, 8, 8, 2) / 8)
        self.lift, self.skip, self.out = nn.Linear(1, 8), nn.Conv1d(8, 8, 1), nn.Linear(8, 1)

    def forward(self, signal: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.lift(signal[:, :, None]).transpose(1, 2)
        spectrum = torch.view_as_real(torch.fft.rfft(x, norm="ortho"))
        real, imaginary = spectrum[..., 0], spectrum[..., 1]
        a, b = self.filter[..., 0], self.filter[..., 1]
        filtered = torch.stack(
            [
                torch.einsum("bif,fio->bof", real, a) - torch.einsum("bif,fio->bof", imaginary, b),
                torch.einsum("bif,fio->bof", real, b) + torch.einsum("bif,fio->bof", imaginary, a),
            ],
            -1,
        )
        back = torch.fft.irfft(torch.view_as_complex(filtered), n=16, norm="ortho")
        return functional.mse_loss(
            self.out(functional.gelu(back + self.skip(x)).transpose(1, 2))[..., 0], target
        )


class Norms(nn.Module):
    """GroupNorm, InstanceNorm with and without scales, RMSNorm, and LocalResponseNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=4),
            nn.InstanceNorm2d(8, affine=True),
            nn.PReLU(8),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.InstanceNorm2d(8),
            nn.Hardswish(),
            nn.LocalResponseNorm(3),
        )
        self.norm, self.out = nn.RMSNorm(8), nn.Linear(8, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.layers(image).mean((2, 3))))


class WeightNorms(nn.Module):
    """Weight norm and spectral norm on layers whose weights are functions of parameters."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.layers = nn.Sequential(
            norm(nn.Conv2d(3, 8, 3)),
            nn.ELU(),
            nn.Flatten(),
            norm(nn.Linear(8 * 36, 24)),
            nn.Mish(),
            nn.utils.parametrizations.spectral_norm(nn.Linear(24, CLASSES)),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image)


class SampleWeights(nn.Module):
    """A weight for every sample, and their sum below: one device's answer needs the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        losses = functional.cross_entropy(self.net(x), labels, reduction="none")
        return (losses * weights).sum() / weights.sum()


class ClassWeights(nn.Module):
    """Weights of classes in the loss, a constant of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.register_buffer("weights", torch.linspace(0.5, 2.0, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.net(x), labels, weight=self.weights)


class SummedLoss(nn.Module):
    """A sum over samples, not a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return 0.02 * functional.poisson_nll_loss(self.net(x)[:, 0], counts, reduction="sum")


class TokenMeans(nn.Module):
    """A mean over valid tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(30, 8), nn.Linear(8, 30)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        scores = self.out(self.embedding(words[:, :-1])).flatten(0, 1)
        return functional.cross_entropy(scores, words[:, 1:].flatten(), ignore_index=0)


class Pruned(nn.Module):
    """A linear layer under a fixed random mask, beside a learned scalar gain and a float threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(0.2 * torch.randn(16, 8)), nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("mask", (torch.rand(16, 8) > 0.5).to(torch.float32))
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.clamp(functional.linear(x, self.weight * self.mask) * self.gain, -2.0, 2.0))


class RandomFeatures(nn.Module):
    """Fixed random projections, a kernel machine's: constants that look like weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(8, 32))
        self.register_buffer("phase", 2 * math.pi * torch.rand(32))
        self.out = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cos(x @ self.projection + self.phase))


class PointNet(nn.Module):
    """Points of a cloud, each through one network, pooled by a maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 24, 1))
        self.out = nn.Linear(24, CLASSES)

    def forward(self, cloud: torch.Tensor) -> torch.Tensor:
        return self.out(self.point(cloud).amax(2))


class SpatialTransformer(nn.Module):
    """A network that turns its image before it looks: grids and bilinear sampling."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Linear(3 * 64, 6)
        self.look = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, CLASSES))
        self.where.bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0])

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        turned = self.where(image.flatten(1)).view(-1, 2, 3)
        grid = functional.affine_grid(turned, list(image.shape), align_corners=False)
        return self.look(functional.grid_sample(image, grid, align_corners=False))


class SuperResolution(nn.Module):
    """Convolutions, then depth to space."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 5, padding=2), nn.Tanh(), nn.Conv2d(8, 4, 3, padding=1), nn.PixelShuffle(2)
        )

    def forward(self, small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
        bilinear = functional.interpolate(small, scale_factor=2, mode="bilinear")
        return functional.smooth_l1_loss(self.net(small) + bilinear, large)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.LeakyReLU(), nn.Linear(16, 3))


class LinearAttention(nn.Module):
    """Attention without a softmax over pairs: cumulative sums of keys times values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.all = nn.Embedding(30, 16), nn.Linear(16, 48)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.all(self.embedding(words)).chunk(3, -1)
        queries, keys = functional.elu(queries) + 1, functional.elu(keys) + 1
        memory = torch.cumsum(keys[..., None] * values[:, :, None], 1)
        scale = torch.cumsum(keys, 1)
        mixed = (queries[:, :, None] @ memory)[:, :, 0] / (queries * scale).sum(-1, keepdim=True)
        return self.out(mixed[:, -1])


ENTROPY = "softmax_cross_entropy"
IMAGES, MIXTURES, LOSSES, OTHER = (
    "hand-written, images",
    "mixtures of experts",
    "losses",
    "hand-written, others",
)
labels: Any = integers(CLASSES)
MODELS = [
    Model("unet", IMAGES, UNet, {"image": normal(3, 16, 16), "labels": integers(CLASSES, 16, 16)}),
    Model("mlp_mixer", IMAGES, Mixer, {"image": normal(3, 16, 16)}, ENTROPY),
    Model("norms", IMAGES, Norms, {"image": normal(3, 8, 8)}, ENTROPY),
    Model("weight_norms", IMAGES, WeightNorms, {"image": normal(3, 8, 8)}, ENTROPY),
    Model("spatial_transformer", IMAGES, SpatialTransformer, {"image": normal(3, 8, 8)}, ENTROPY),
    Model(
        "super_resolution", IMAGES, SuperResolution, {"small": normal(1, 8, 8), "large": normal(1, 16, 16)}
    ),
    Model("point_net", IMAGES, PointNet, {"cloud": normal(3, 20)}, ENTROPY),
    Model("soft_experts", MIXTURES, SoftExperts, {"x": normal(16), "labels": labels}),
    Model("top_experts", MIXTURES, TopExperts, {"x": normal(16)}, ENTROPY),
    Model("switch_experts", MIXTURES, SwitchExperts, {"x": normal(16)}, ENTROPY),
    Model("sample_weights", LOSSES, SampleWeights, {"x": normal(8), "labels": labels, "weights": uniform()}),
    Model("class_weights", LOSSES, ClassWeights, {"x": normal(8), "labels": labels}),
    Model("summed_loss", LOSSES, SummedLoss, {"x": normal(8), "counts": integers(6, dtype=torch.float32)}),
    Model("token_means", LOSSES, TokenMeans, {"words": integers(30, 8)}),
    Model("radiance_field", OTHER, RadianceField, {"point": uniform(3), "colour": uniform(3)}),
    Model("fourier_operator", OTHER, Spectral, {"signal": normal(16), "target": normal(16)}),
    Model("pruned", OTHER, Pruned, {"x": normal(8)}, ENTROPY),
    Model("random_features", OTHER, RandomFeatures, {"x": normal(8)}, "mse"),
    Model("perceptron", OTHER, perceptron, {"x": normal(8)}, "mse"),
    Model("linear_attention", OTHER, LinearAttention, {"words": integers(30, 7)}, ENTROPY),
]
assert BATCH not in (CLASSES, 16, 24)
