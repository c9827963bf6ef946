"""Choose by name which float tensors are trained; the others stay constants of the graph.

An exported graph keeps masks, rotary tables and position tables among its initializers, where they look
like weights: nothing but their names tells them apart.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import onnx

from partc.compiler.training.node_builder import RANDOM_OPS
from partc.compiler.training.parameters import candidate_parameters
from partc.compiler.training.tensor_types import Types
from partc.runtime.errors import BadUsage


@dataclass(frozen=True, slots=True)
class ParameterChoice:
    """Patterns of names (`*`, `?`, `[a-z]`): what is trained (None: all that can be), less what is frozen.

    What is frozen is a constant of the step: it gets no gradient, no slots and no next value.
    """

    train: tuple[str, ...] | None = None
    freeze: tuple[str, ...] = ()

    def choose(
        self, graph: onnx.GraphProto, types: Types, declared: Sequence[str], untrained: Collection[str]
    ) -> tuple[str, ...]:
        """Return what is trained, as far as the loss depends on it. Raises BadUsage.

        By default that is what the model declares, or else every candidate; `train` may name any candidate,
        and a scalar, which is no candidate by itself, by its full name. `untrained` stays so.
        """
        possible = candidate_parameters(graph, types)
        check_fit("--freeze", self.freeze, [*possible, *declared])
        pool = declared or possible
        if self.train is not None:
            pool = tuple(dict.fromkeys((*declared, *possible, *_named_scalars(graph, types, self.train))))
        pool = tuple(name for name in pool if name in types and name not in untrained)
        check_fit("--train", self.train or (), pool)
        chosen = tuple(name for name in pool if self._trains(name))
        if pool and not chosen:
            raise BadUsage(
                "every parameter is frozen",
                at="--freeze",
                fix=f"leave some of {sorted(pool)[:8]} to train",
            )
        _check_kept(graph, set(pool) - set(chosen))
        return chosen

    def _trains(self, name: str) -> bool:
        return (self.train is None or fits(name, self.train)) and not fits(name, self.freeze)

    def check_reached(self, chosen: Collection[str], reached: Sequence[str]) -> None:
        """Raise BadUsage where the loss depends on nothing that a pattern of `train` asks for."""
        effective = (p for p in self.train or () if any(fnmatchcase(name, p) for name in chosen))
        check_fit("--train", effective, reached, " that the loss depends on")


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether a name fits one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_fit(option: str, patterns: Iterable[str], names: Sequence[str], which: str = "") -> None:
    """Raise BadUsage for a pattern that no name fits."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise BadUsage(
                f"no parameter{which} has a name that fits {pattern!r}",
                at=option,
                fix=f"use patterns for some of {sorted(names)[:8]}",
            )


def _named_scalars(graph: onnx.GraphProto, types: Types, names: Collection[str]) -> list[str]:
    return [t.name for t in graph.initializer if t.name in names and types[t.name].is_float]


def _check_kept(graph: onnx.GraphProto, frozen: set[str]) -> None:
    """Raise BadUsage for a frozen tensor that the graph would draw anew at every step."""
    for node in graph.node:
        if node.op_type in RANDOM_OPS and frozen.intersection(node.output):
            raise BadUsage(
                f"{node.output[0]!r} would be drawn anew at every step: only a variable keeps what it drew",
                at=f"node {node.name!r}, left out by --train or --freeze",
                fix="train it too, or write the model with its values as an initializer",
            )
