"""A forward export, and which of its initializers are parameters of the module, by their values."""

import ast
import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import torch

from tests.peers.score_parameters import Stored
from tests.peers.zoo.export import digest


@dataclass(frozen=True)
class Exported:
    """One variant of a model's export, and the facts about its module."""

    path: Path
    variant: str
    facts: dict[str, Any]

    @cached_property
    def _model(self) -> onnx.ModelProto:
        return onnx.load(self.path)

    @cached_property
    def _initializers(self) -> dict[str, np.ndarray]:
        return {t.name: onnx.numpy_helper.to_array(t) for t in self._model.graph.initializer}

    @cached_property
    def _sources(self) -> dict[str, set[str]]:
        return {
            value.name: set(ast.literal_eval(entry.value))
            for value in self._model.graph.value_info
            for entry in value.metadata_props
            if entry.key.endswith("folded_from")
        }

    @cached_property
    def _parameters_by_hash(self) -> dict[tuple[str, tuple[int, ...]], list[str]]:
        found = defaultdict(list)
        key = "perturbed_sha256" if self.variant == "perturbed" else "sha256"
        for fact in self.facts["parameters"]:
            found[fact[key], tuple(fact["shape"])].append(fact["name"])
        return found

    @cached_property
    def members(self) -> dict[str, tuple[list[str], bool]]:
        """Return the module's parameters that an initializer holds, by its name, and whether transposed.

        In a raw export names are kept. In an optimised one parameters are known by their values: one may hold
        several equal ones, and those that are transposed have other names. (A folded weight norm is as its
        parameter at first, under another name and not transposed.)
        """
        names = {fact["name"]: fact["name"] for fact in self.facts["parameters"]}
        for tied in self.facts["tied"]:
            names |= dict.fromkeys(tied, next(name for name in tied if name in names))
        found = {}
        for name, value in self._initializers.items():
            if self.variant == "raw":
                if name in names:
                    found[name] = [names[name]], False
                continue
            if value.dtype.kind != "f":
                continue
            for is_transposed in (False, True):
                array = value.T if is_transposed else value
                if is_transposed and value.ndim != 2:
                    continue
                hashed = digest(torch.from_numpy(np.array(array, np.float32)))
                same = self._parameters_by_hash.get((hashed, array.shape))
                if same and (is_transposed or name in names):
                    found[name] = same, is_transposed
                    break
        return found

    @cached_property
    def _facts_of(self) -> dict[str, dict[str, Any]]:
        return {fact["name"]: fact for fact in self.facts["parameters"]}

    @cached_property
    def _constants(self) -> set[str]:
        """Return the initializers that are equal to a buffer or a frozen parameter as well."""
        constant = {(fact["sha256"], tuple(fact["shape"])) for fact in self.facts["buffers"]}
        found = set()
        for name, (members, _) in self.members.items():
            fact = self._facts_of[members[0]]
            is_frozen = not all(self._facts_of[member]["trained"] for member in members)
            if is_frozen or (
                self.variant == "optimised" and (fact["sha256"], tuple(fact["shape"])) in constant
            ):
                found.add(name)
        return found

    @cached_property
    def trainable(self) -> list[str]:
        """Return the initializers that hold parameters that the loss reaches, and nothing else."""
        return [
            name
            for name, (members, _) in self.members.items()
            if name not in self._constants and any(self._facts_of[member]["reached"] for member in members)
        ]

    @cached_property
    def comparable(self) -> list[str]:
        """Return those that hold one parameter, and of which that parameter has only one.

        The exporter stores a tied parameter several times, makes one of equal ones, drops zeros that are
        added, and computes what meets only constants: what it then trains is not what the module does.
        """
        holders = defaultdict(list)
        for name in self.members:
            for member in self.members[name][0]:
                holders[member].append(name)
        folded = set().union(
            *(self._folded_from(name) for name in self._initializers if name not in self.members)
        )
        alone = {name: members[0] for name, (members, _) in self.members.items() if len(members) == 1}
        return [
            name
            for name in self.trainable
            if name in alone and len(holders[alone[name]]) == 1 and alone[name] not in folded
        ]

    def _folded_from(self, name: str) -> set[str]:
        """Return the parameters from which the exporter computed an initializer, as it notes."""
        return self._sources.get(name, set()) & self._facts_of.keys()

    def stored(self, kind: Literal["parameters", "buffers"]) -> list[Stored]:
        """Return the module's tensors of a kind, for score_parameters.

        Parameters that need no gradient are parameters as well: no export tells them apart, only the user.
        """
        return [(fact["name"], tuple(fact["shape"]), fact["sha256"]) for fact in self.facts[kind]]

    @property
    def trained_parameters(self) -> int:
        """Return how many parameters the module trains."""
        return sum(fact["trained"] and fact["reached"] for fact in self.facts["parameters"])


def read_exported(name: str, variant: str, cache: Path) -> Exported:
    """Read one variant of a model's export."""
    return Exported(
        cache / f"{name}.{variant}.onnx", variant, json.loads((cache / f"{name}.json").read_text())
    )
