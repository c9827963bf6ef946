"""What the zoo knows of a model: how to build it, what it reads, and what is minimised."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

BATCH = 60  # divides among 3, 4 and 5 ranks, and no other dimension of a model has this size

Draw = Callable[[torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class Model:
    """One module with random weights, and its data. `loss` is what `partc grad --loss` takes.

    That of softmax_cross_entropy or mse is put on the module's one output; another is that output's name.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Mapping[str, Draw]
    loss: str = "loss"
    axes: Mapping[str, int | None] = field(default_factory=dict)  # of samples, where it is not axis 0

    def sample_axes(self) -> dict[str, int | None]:
        """Return the sample axis of every input, and of what a loss adds."""
        return {name: self.axes.get(name, 0) for name in (*self.inputs, "labels", "targets")}

    def module(self) -> nn.Module:
        """Build the module, with the same values at every call, as it is evaluated."""
        torch.manual_seed(sum(map(ord, self.name)))
        return self.build().eval()

    def draw(self, seed: int) -> dict[str, torch.Tensor]:
        """Draw one batch of its data."""
        generator = torch.Generator().manual_seed(seed)
        return {name: draw(generator) for name, draw in self.inputs.items()}

    @property
    def output(self) -> str:
        """Return the name of the exported output."""
        return "logits" if self.loss in ("softmax_cross_entropy", "mse") else self.loss


def normal(*shape: int) -> Draw:
    """Draw a batch of floats."""
    return lambda generator: torch.randn(BATCH, *shape, generator=generator)


def uniform(*shape: int) -> Draw:
    """Draw a batch of floats from 0 to 1."""
    return lambda generator: torch.rand(BATCH, *shape, generator=generator)


def integers(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Draw:
    """Draw a batch of ids, labels or counts below `high`."""
    return lambda generator: torch.randint(0, high, (BATCH, *shape), generator=generator).to(dtype)


def ones(*shape: int, dtype: torch.dtype = torch.int64) -> Draw:
    """Give a batch of ones: an attention mask that hides nothing."""
    return lambda generator: torch.ones(BATCH, *shape, dtype=dtype)


def prefix_mask(length: int) -> Draw:
    """Draw an attention mask int64[batch, length]: some tokens of each sample, from the first on."""

    def draw(generator: torch.Generator) -> torch.Tensor:
        kept = torch.randint(1, length + 1, (BATCH, 1), generator=generator)
        return (torch.arange(length) < kept).to(torch.int64)

    return draw
