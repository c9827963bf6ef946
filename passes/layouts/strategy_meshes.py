"""The meshes that a strategy divides the workers into: its grid, once for every stage, and operators' own.

    "mesh": {"data": 2, "tensor": 2}, "stages": 2             two grids of four workers, one after the other
    "mesh": {"tensor": 2}, "devices": ["h0/gpu1", "h0/gpu0"]  one of two, the others are idle
    "ops": [{"op": "rnn0", "devices": ["host0/gpu0", "host1/gpu0"], "split": {"batch": 2}}]     one of two

All have the axes of the grid, of one place where an operator's own devices are not divided so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from partc.cost.strategy import OpConfig, Strategy
from partc.passes.layouts.layouts import MICROBATCHES, WORKER
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.runtime.errors import BadStrategy

BATCH = "batch"  # the dimension of samples, always along the first axis
FIRST_AXIS = "data"
MOST_AXES = 32  # of a grid of ranks, which numpy is to hold as an array


def meshes_of(strategy: Strategy, workers: Sequence[str]) -> Meshes:
    """Return a strategy's meshes, in the order in which it names them.

    `workers`: the names of the cluster's devices. Raises BadStrategy where they do not make those meshes.
    """
    meshes: list[Mesh] = []
    names = _axis_names(strategy)
    _check_axes(strategy, names)
    _check_fills(strategy, workers)
    if strategy.mesh:
        axes = [(name, strategy.mesh.get(name, 1)) for name in names]
        places = _positions(strategy.devices, workers, "devices")
        meshes += _stages((*axes, *_microbatch_axes(strategy)), strategy.stages, places)
    for number, config in enumerate(strategy.ops):
        if config.devices:
            mesh = _own_mesh(config, strategy, names, workers, f"ops[{number}]")
            if _number(meshes, mesh) is None:
                meshes.append(replace(mesh, name=f"mesh{len(meshes)}"))
    return Meshes(tuple(meshes))


def number_of(
    config: OpConfig, strategy: Strategy, meshes: Meshes, workers: Sequence[str], at: str
) -> int | None:
    """Return the number of the mesh that an entry for ops names, None where it leaves that open."""
    if not config.devices:
        return config.stage
    return _number(meshes.each, _own_mesh(config, strategy, names_of(meshes.each[0]), workers, at))


def names_of(mesh: Mesh) -> list[str]:
    """Return the names of a mesh's axes, which all have."""
    return [name for name, _ in mesh.grid]


def own_axes(config: OpConfig, strategy: Strategy, names: Sequence[str], at: str) -> dict[str, str]:
    """Return along which axes the devices of an entry's own divide each dimension.

    Samples along the first; other dimensions along those that they name, else along the next. `names`: of
    all axes. Raises BadStrategy.
    """
    named: dict[str, str] = {}
    for dimension, parts in _split(config).items():
        if isinstance(parts, str):
            if unknown := [name for name in parts.split("*") if name not in strategy.mesh]:
                raise BadStrategy(
                    f"unknown mesh axis {unknown[0]!r}",
                    at=f"{at}: split: {dimension}",
                    fix="write into how many parts, as the devices are the operator's own",
                )
            named[dimension] = parts
        elif parts < 1:
            raise BadStrategy(f"{parts} parts", at=f"{at}: split: {dimension}", fix="write 1 or more")
        else:
            taken = {name for axes in named.values() for name in axes.split("*")}
            free = [name for name in names[1:] if name not in taken]
            named[dimension] = names[0] if dimension == BATCH else free[0]
    return named


def _own_mesh(
    config: OpConfig, strategy: Strategy, names: Sequence[str], workers: Sequence[str], at: str
) -> Mesh:
    split = _split(config)
    sizes: dict[str, int] = {}
    for dimension, along in own_axes(config, strategy, names, at).items():
        parts = split[dimension]
        if isinstance(parts, int):
            sizes[along] = parts
        else:
            sizes.update((name, strategy.mesh[name]) for name in along.split("*"))
    own = _positions(config.devices, workers, f"{at}: devices")
    if prod(sizes.values()) != len(own):
        raise BadStrategy(
            f"{prod(sizes.values())} parts on {len(own)} devices",
            at=at,
            fix="let the product of what `split` says be the number of `devices`",
        )
    axes = [(name, sizes.get(name, 1)) for name in names]
    return Mesh("", (*axes, *_microbatch_axes(strategy)), own)


def _split(config: OpConfig) -> Mapping[str, int | str]:
    return {BATCH: len(config.devices)} if config.split is None else config.split


def _number(meshes: Sequence[Mesh], like: Mesh) -> int | None:
    """Return the number of the mesh of the same axes and workers, None if there is none."""
    alike = (n for n, mesh in enumerate(meshes) if (mesh.axes, mesh.workers) == (like.axes, like.workers))
    return next(alike, None)


def _microbatch_axes(strategy: Strategy) -> list[tuple[str, int]]:
    return [] if strategy.microbatches == 1 else [(MICROBATCHES, strategy.microbatches)]


def _axis_names(strategy: Strategy) -> list[str]:
    """Return the names of all meshes' axes: the grid's, and as many as any operator divides at once."""
    names = list(strategy.mesh) or [FIRST_AXIS]
    own = [_split(config) for config in strategy.ops if config.devices]
    most = max((sum(len(str(parts).split("*")) for parts in split.values()) for split in own), default=0)
    return [*names, *(f"axis{number}" for number in range(len(names), most + 1))]


def _check_axes(strategy: Strategy, names: Sequence[str]) -> None:
    if unclear := [name for name in strategy.mesh if not name or "*" in name]:
        raise BadStrategy(
            f"a mesh axis {unclear[0]!r}",
            at="mesh",
            fix="name axes without `*`, which joins those that split a dimension together",
        )
    if len(names) <= MOST_AXES:
        return
    at, fix = "mesh", f"name {MOST_AXES} axes at most: leave out those of size 1"
    if len(strategy.mesh) <= MOST_AXES:
        at, fix = "ops: split", f"split {MOST_AXES - 1} dimensions at most: leave out those of 1 part"
    raise BadStrategy(f"a mesh of {len(names)} axes", at=at, fix=fix)


def _stages(axes: tuple[tuple[str, int], ...], stages: int, places: Sequence[int]) -> list[Mesh]:
    """Return the grids of the workers at some places, of the first ones where none are given."""
    if stages == 1:
        return [Mesh("mesh0" if places else WORKER, axes, tuple(places))]
    size = len(Mesh(WORKER, axes).workers)
    places = places or range(stages * size)
    return [Mesh(f"stage{n}", axes, tuple(places[n * size : (n + 1) * size])) for n in range(stages)]


def _check_fills(strategy: Strategy, workers: Sequence[str]) -> None:
    """Refuse a grid that does not have as many places as there are workers for it."""
    sizes, stages = strategy.mesh.values(), strategy.stages
    if strategy.devices and not sizes:
        raise BadStrategy(
            "devices of a mesh, but no mesh",
            at="devices",
            fix=f'name its axes, such as "mesh": {{"data": {len(strategy.devices)}}}, or write `devices` '
            "beside the `op` that they run",
        )
    count = len(strategy.devices or workers)
    if sizes and (prod(sizes) * stages != count or min(sizes) < 1):
        shape = " x ".join(map(str, sizes))
        each = "" if stages == 1 else f" for each of {stages} stages"
        others = "name other `devices`" if strategy.devices else "name the `devices` that it is made of"
        raise BadStrategy(
            f"a mesh of {shape}{each} on {count} {'devices' if strategy.devices else 'workers'}",
            at="mesh",
            fix=f"let the product of its axes{' and of the stages' * bool(each)} be {count}, or {others}",
        )


def _positions(devices: Sequence[str], workers: Sequence[str], at: str) -> tuple[int, ...]:
    if unknown := [device for device in devices if device not in workers]:
        known = ", ".join(repr(name) for name in workers[:10]) + (" ..." if len(workers) > 10 else "")
        raise BadStrategy(f"unknown device {unknown[0]!r}", at=at, fix=f"use the cluster's: {known}")
    if len(set(devices)) < len(devices):
        twice = next(device for device in devices if devices.count(device) > 1)
        raise BadStrategy(f"device {twice!r} is named twice", at=at, fix="name each device once")
    return tuple(workers.index(device) for device in devices)
