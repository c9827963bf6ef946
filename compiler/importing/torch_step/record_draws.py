"""Random numbers as PyTorch draws them, kept, so that the exported step can be given the same.

Dropout asks for Bernoulli draws, which the exporter writes as uniform ones that are compared: here they
are drawn in that way too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_UNIFORM_OR_NORMAL = (aten.rand.default, aten.rand_like.default, aten.randn.default, aten.randn_like.default)


class RecordedDraws(TorchDispatchMode):  # type: ignore[misc]  # untyped where torch is missing
    """While it is active, every draw is kept in `draws`, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[torch.Tensor] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # whatever the op returns
        if func is aten.bernoulli_.float:
            return args[0].copy_(self._is_below(args[0], args[1] if len(args) > 1 else 0.5))
        if func is aten.bernoulli.p:
            return self._is_below(args[0], args[1]).to(args[0].dtype)
        if func is aten.native_dropout.default and (args[2] or args[2] is None):
            mask = self._is_below(args[0], 1 - args[1])
            return args[0] * mask / (1 - args[1]), mask
        result = func(*args, **(kwargs or {}))
        if func in _UNIFORM_OR_NORMAL:
            self.draws.append(result.detach().clone())
        return result

    def _is_below(self, like: torch.Tensor, chance: float) -> torch.Tensor:
        uniform = torch.rand(like.shape)
        self.draws.append(uniform)
        return uniform < chance
