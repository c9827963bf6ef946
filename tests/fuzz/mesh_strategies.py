"""Strategies that split variables and operators along a mesh: right ones, and such as ask what cannot be."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partc.compiler.api import inspect
from partc.cost.strategy import MESH_STRATEGY_FORMAT
from tests.fuzz.damage import damage_json

MESHES: tuple[dict[str, int], ...] = (
    {"data": 4},
    {"tensor": 4},
    {"data": 2, "tensor": 2},
    {"data": 1, "tensor": 4},
    {"data": 2, "rows": 2, "tensor": 1},
    {"data": 1, "rows": 2, "tensor": 2},
)


@dataclass(frozen=True)
class Splittable:
    """What a step has to split: variable -> shape, op -> dimension -> the largest number of parts."""

    step: str
    variables: Mapping[str, tuple[int, ...]]
    ops: Mapping[str, Mapping[str, int]]


def splittable(folder: Path, step: str) -> Splittable:
    """Look at the step STEP.onnx of a folder."""
    seen = inspect(folder / f"{step}.onnx")
    variables = {entry.name: entry.shape for entry in seen.variables}
    return Splittable(step, variables, {group.node: group.splits for group in seen.groups})


def draw_mesh_strategy(of: Splittable, draw: random.Random) -> bytes:
    """Return a strategy of format 2 for a step; one in three is damaged afterwards."""
    mesh = dict(draw.choice(MESHES))
    strategy: dict[str, Any] = {  # a JSON tree
        "format": MESH_STRATEGY_FORMAT,
        "batch": draw.choice(("per-replica", "global")),
        "parameters": {},
        "mesh": mesh,
        "variables": _variables(of, mesh, draw),
        "ops": _ops(of, mesh, draw),
    }
    text = json.dumps(strategy).encode()
    return damage_json(text, draw) if draw.random() < 0.33 else text


def _variables(of: Splittable, mesh: Mapping[str, int], draw: random.Random) -> dict[str, Any]:
    """Split some variables; mostly an axis that divides."""
    chosen: dict[str, Any] = {}
    for name, shape in of.variables.items():
        if not shape or draw.random() < 0.6:
            continue
        splits = {}
        for mesh_axis, parts in mesh.items():
            fitting = [axis for axis, size in enumerate(shape) if size % parts == 0]
            axis = draw.choice(fitting) if fitting and draw.random() < 0.95 else draw.randrange(len(shape))
            if draw.random() < 0.5:
                splits[mesh_axis] = {"axis": axis} | ({"outer": 2} if draw.random() < 0.1 else {})
        chosen[name] = splits
    return chosen


def _ops(of: Splittable, mesh: Mapping[str, int], draw: random.Random) -> list[dict[str, Any]]:
    """Split some ops along axes, or into so many parts; mostly such as `inspect --groups` allows."""
    configs = []
    for op, dimensions in of.ops.items():
        if not dimensions or draw.random() < 0.6:
            continue
        split: dict[str, Any] = {}
        for mesh_axis, parts in mesh.items():
            fitting = [name for name, most in dimensions.items() if most % parts == 0]
            names = fitting if fitting and draw.random() < 0.95 else sorted(dimensions)
            name = draw.choice([*names, "batch"] if mesh_axis == next(iter(mesh)) else names)
            if draw.random() < 0.6:
                split[name] = mesh_axis if draw.random() < 0.8 else parts
        configs.append({"op": op, "split": split})
    return configs
