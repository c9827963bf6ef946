"""Contrastive learning, autoencoders and generators: losses that couple samples, or that draw."""

import torch
from torch import nn
from torch.nn import functional

from tests.peers.zoo.model import BATCH, Model, integers, normal, uniform

PIXELS = 48


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(PIXELS, 24), nn.ReLU(), nn.Linear(24, 16))


class BarlowTwins(nn.Module):
    """Two views' features, each normalised over the batch, correlated: the identity is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        a, b = (_standardise(self.encoder(view)) for view in (one, other))
        difference = (a.T @ b / one.shape[0] - torch.eye(16)).square()
        weights = 0.05 + 0.95 * torch.eye(16)
        return (difference * weights).sum()


def _standardise(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-4).sqrt()


class SimClr(nn.Module):
    """NT-Xent: 2 N views, each of which is to find its other one among all."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        features = functional.normalize(self.encoder(torch.cat([one, other])))
        count = one.shape[0]
        scores = (features @ features.T / 0.5).masked_fill(torch.eye(2 * count, dtype=torch.bool), -1e9)
        partner = torch.cat([torch.arange(count, 2 * count), torch.arange(count)])
        return functional.cross_entropy(scores, partner)


class Pairs(nn.Module):
    """CLIP's loss on two small encoders: a learned scalar temperature, cross entropy both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = encoder(), encoder()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        a, b = functional.normalize(self.left(one)), functional.normalize(self.right(other))
        scores = a @ b.T * self.temperature.exp()
        wanted = torch.arange(one.shape[0])
        return (functional.cross_entropy(scores, wanted) + functional.cross_entropy(scores.T, wanted)) / 2


class Vicreg(nn.Module):
    """Invariance, variance and covariance."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        a, b = self.encoder(one), self.encoder(other)
        spread = sum(torch.relu(1 - (x.var(0) + 1e-4).sqrt()).mean() for x in (a, b))
        return functional.mse_loss(a, b) + spread + _off_diagonal(a) + _off_diagonal(b)


def _off_diagonal(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(0)
    covariance = centred.T @ centred / (x.shape[0] - 1)
    return (covariance.square().sum() - covariance.diagonal().square().sum()) / 16


class Triplets(nn.Module):
    """An anchor nearer to its like than to another, by a margin."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = encoder()

    def forward(self, anchor: torch.Tensor, like: torch.Tensor, unlike: torch.Tensor) -> torch.Tensor:
        return functional.triplet_margin_loss(*(self.encoder(x) for x in (anchor, like, unlike)))


class Siamese(nn.Module):
    """SimSiam: a predictor, and a view that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = encoder(), nn.Linear(16, 16)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        a, b = self.encoder(one), self.encoder(other)
        return -(
            functional.cosine_similarity(self.predictor(a), b.detach()).mean()
            + functional.cosine_similarity(self.predictor(b), a.detach()).mean()
        )


class Autoencoder(nn.Module):
    """Convolutions down, transposed convolutions up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1))
        self.up = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.up(self.down(image)), image)


class Variational(nn.Module):
    """A variational autoencoder whose noise is given as data."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.log_variance = encoder(), nn.Linear(16, 8), nn.Linear(16, 8)
        self.decoder = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, PIXELS))

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.encoder(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        decoded = self.decoder(mean + noise * torch.exp(0.5 * log_variance))
        prior = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return functional.binary_cross_entropy_with_logits(decoded, x) + 0.1 * prior


class Quantised(nn.Module):
    """A vector-quantised autoencoder: nearest codes, gradients straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = encoder(), nn.Embedding(10, 16), nn.Linear(16, PIXELS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(x)
        distance = (hidden[:, None] - self.codes.weight[None]).square().sum(-1)
        code = self.codes(distance.argmin(1))
        straight = hidden + (code - hidden).detach()
        commitment = functional.mse_loss(hidden, code.detach()) + functional.mse_loss(code, hidden.detach())
        return functional.mse_loss(self.decoder(straight), x) + commitment


class Denoiser(nn.Module):
    """A diffusion model's step: noise of a level from a table of constants, predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.linspace(0.99, 0.01, 20))
        self.levels = nn.Embedding(20, 8)
        self.net = nn.Sequential(nn.Linear(PIXELS + 8, 32), nn.SiLU(), nn.Linear(32, PIXELS))

    def forward(self, x: torch.Tensor, level: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        kept = self.kept[level][:, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return functional.mse_loss(self.net(torch.cat([noisy, self.levels(level)], 1)), noise)


class Distilled(nn.Module):
    """A student under a frozen teacher: its parameters need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = (
            nn.Linear(PIXELS, 5),
            nn.Sequential(nn.Linear(PIXELS, 8), nn.ReLU(), nn.Linear(8, 5)),
        )
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        score = self.student(x)
        soft = functional.kl_div(
            score.log_softmax(1), self.teacher(x).log_softmax(1), log_target=True, reduction="batchmean"
        )
        return soft + functional.cross_entropy(score, labels)


FAMILY, GENERATIVE = "contrastive", "autoencoders and generators"
views = {"one": normal(PIXELS), "other": normal(PIXELS)}
MODELS = [
    Model("barlow_twins", FAMILY, BarlowTwins, views),
    Model("simclr", FAMILY, SimClr, views),
    Model("clip_pairs", FAMILY, Pairs, views),
    Model("vicreg", FAMILY, Vicreg, views),
    Model("simsiam", FAMILY, Siamese, views),
    Model("triplets", FAMILY, Triplets, {name: normal(PIXELS) for name in ("anchor", "like", "unlike")}),
    Model("distilled", FAMILY, Distilled, {"x": normal(PIXELS), "labels": integers(5)}),
    Model("autoencoder", GENERATIVE, Autoencoder, {"image": uniform(3, 16, 16)}),
    Model("vae", GENERATIVE, Variational, {"x": uniform(PIXELS), "noise": normal(8)}),
    Model("vq_vae", GENERATIVE, Quantised, {"x": normal(PIXELS)}),
    Model(
        "denoiser",
        GENERATIVE,
        Denoiser,
        {"x": normal(PIXELS), "level": integers(20), "noise": normal(PIXELS)},
    ),
]
assert BATCH not in (PIXELS, 24, 16)
