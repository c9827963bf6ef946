"""Random clusters, and what a newcomer may ask of them: names and products of them, or files of any words.

Nothing is kept from asking what cannot be: that is refused.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from partc.cost.cluster.cluster import CLUSTER_FORMAT
from partc.cost.strategy import MESH_STRATEGY_FORMAT
from partc.passes.search.operators.find_groups import OperatorGroup

WORDS = ("data", "tensor", "fsdp", "spatial", "pipeline", "replicas", "microbatches")
MODES = ("auto", "hybrid", "allreduce", "ps", "one-weird-trick", "layerwise")


@dataclass(frozen=True)
class DrawnCluster:
    """A cluster.json as text, and its devices."""

    text: str
    devices: tuple[str, ...]


def random_cluster_file(rng: np.random.Generator) -> DrawnCluster:
    """Draw 1 to 8 devices on 1 to 3 hosts, equally many on each or not."""
    hosts = int(rng.integers(1, 4))
    counts = [int(rng.integers(1, 8 // hosts + 1))] * hosts
    if rng.random() < 0.4:
        counts = [int(rng.integers(1, 8 // hosts + 1)) for _ in counts]
    names = [[f"h{host}/cpu{n}" for n in range(count)] for host, count in enumerate(counts)]
    device = {"kind": "cpu", "profile": "cpu-core", "threads": 1}
    described = {
        "format": CLUSTER_FORMAT,
        "name": "drawn",
        "hosts": [
            {
                "name": f"h{host}",
                "address": "localhost",
                "memory_bytes": 2**34,
                "devices": [{"name": name, **device} for name in own],
            }
            for host, own in enumerate(names)
        ],
        "switches": ["switch"] if hosts > 1 else [],
        "links": [
            {"ends": [f"h{host}", "switch"], "bytes_per_s": 125e6, "latency_s": 5e-5}
            for host in range(hosts if hosts > 1 else 0)
        ],
    }
    return DrawnCluster(json.dumps(described), tuple(name for own in names for name in own))


def random_name(workers: int, rng: np.random.Generator) -> str:
    """Draw a name, or a product of up to three, mostly such as make a grid of the workers."""
    if rng.random() < 0.3:
        return str(rng.choice(MODES))
    words, rest = [], workers
    for word in rng.permutation(WORDS)[: int(rng.integers(1, 4))]:
        if word in ("data", "fsdp") and rng.random() < 0.5:
            words.append(str(word))
            continue
        size = int(rng.integers(1, 9)) if rng.random() < 0.2 else int(rng.choice(_divisors(rest)))
        rest = rest if word == "microbatches" else max(1, rest // size)
        words.append(f"{word}={size}")
    if rng.random() < 0.15:
        number = int(rng.integers(1, workers + 2))  # one too many now and then
        words = [f"workers={number}", *(word for word in words if word.startswith("microbatches"))]
    return ",".join(words)


def random_file(
    groups: Sequence[OperatorGroup], devices: Sequence[str], rng: np.random.Generator
) -> dict[str, Any]:
    """Draw a strategy file: a grid, stages, micro-batches, and entries for operators or patterns of them."""
    form = str(rng.choice(["devices", "grid", "both"]))
    strategy: dict[str, Any] = {
        "format": MESH_STRATEGY_FORMAT,
        "batch": str(rng.choice(["global", "per-replica"], p=[0.8, 0.2])),
        "parameters": {},
    }
    grid, stages = {}, 1
    if form != "devices":
        stages = int(rng.choice(_divisors(len(devices)))) if rng.random() < 0.4 else 1
        grid = _random_grid(len(devices) // stages, rng)
        strategy |= {"mesh": grid} | ({"stages": stages} if stages > 1 else {})
    if rng.random() < 0.3:
        strategy["microbatches"] = int(rng.integers(2, 5))
    splittable = [group for group in groups if group.splits]
    entries = []
    for _ in range(int(rng.integers(1, 6))):
        group = splittable[int(rng.integers(len(splittable)))]
        is_pattern = rng.random() < 0.2
        entry = {
            "op": f"{group.node[: int(rng.integers(1, len(group.node) + 1))]}*" if is_pattern else group.node
        }
        if form == "devices" or (form == "both" and rng.random() < 0.5):
            entry |= _on_devices(group, devices, rng)
        else:
            entry |= {"stage": int(rng.integers(stages))} if stages > 1 else {}
            entry |= {"split": _along(group, grid, rng)}
        entries.append(entry)
    return strategy | {"ops": entries}


def _random_grid(workers: int, rng: np.random.Generator) -> dict[str, int]:
    sizes, rest = {}, workers
    for name in ("data", "tensor"):
        sizes[name] = int(rng.choice(_divisors(rest)))
        rest //= sizes[name]
    return sizes | {"rows": rest}


def _along(group: OperatorGroup, grid: dict[str, int], rng: np.random.Generator) -> dict[str, str]:
    split: dict[str, str] = {}
    for axis in grid:
        names = ["batch", *group.splits] if axis == "data" else list(group.splits)
        dimension = str(rng.choice(names))
        if rng.random() < 0.6:
            split[dimension] = f"{split[dimension]}*{axis}" if dimension in split else axis
    return split


def _on_devices(group: OperatorGroup, devices: Sequence[str], rng: np.random.Generator) -> dict[str, Any]:
    own = [str(name) for name in rng.permutation(devices)[: int(rng.integers(1, len(devices) + 1))]]
    split: dict[str, int] = {}
    for dimension in rng.permutation(["batch", *group.splits])[:2]:
        parts = int(rng.choice(_divisors(len(own) // prod(split.values()))))
        split |= {str(dimension): parts} if parts > 1 else {}
    return {"op": group.node, "split": split, "devices": own[: prod(split.values())]}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
