"""Turn what a strategy says in words into layouts of variables and wishes of ops.

    "variables": {"layer0.weight": {"tensor": {"axis": 1}}}         kept by columns along axis tensor
    "ops": [{"op": "layer*/MatMul", "split": {"out:1": "tensor"}}]   what nodes of these names split

What a dimension means to a node: layouts/dimension_wishes.py. Which meshes there are, those of ops with
devices of their own too: layouts/strategy_meshes.py.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

import onnx_graphsurgeon as gs

from partc.cost.strategy import AxisSplit, OpConfig, Strategy
from partc.passes.analysis import Analysis
from partc.passes.layouts.configuration import (
    NOWHERE_ELSE,
    Configuration,
    Places,
    Wish,
    data_parallel,
    home_of_follower,
)
from partc.passes.layouts.dimension_wishes import wishes_of
from partc.passes.layouts.layouts import MICROBATCHES, REPLICAS, Layout, Replicate, Split
from partc.passes.layouts.meshes import Mesh, Meshes
from partc.passes.layouts.place_nodes import place_nodes
from partc.passes.layouts.strategy_meshes import (
    BATCH,
    FIRST_AXIS,
    meshes_of,
    names_of,
    number_of,
    own_axes,
)
from partc.passes.search.operators.forward_nodes import forward_nodes
from partc.runtime.errors import BadStrategy, some_of

WILDCARDS = {"*": ".*", "?": "."}  # alone: brackets are ordinary in names of nodes


OperatorEntry = tuple[int, OpConfig, list[gs.Node]]  # the number of an entry for ops, the entry, its nodes


def configure(analysis: Analysis, strategy: Strategy) -> Configuration:
    """Return what a strategy asks of the workers' meshes. Raises BadStrategy where that cannot be."""
    if not strategy.has_meshes:
        _check_needs_no_mesh(strategy, len(analysis.workers))
        return data_parallel(analysis.replicas)
    _check_has_no_servers(strategy)
    _check_microbatches(strategy)
    _check_stages(strategy, len(analysis.workers))
    meshes = meshes_of(strategy, analysis.workers)
    _check_samples(analysis, meshes)
    entries = list(_operator_entries(analysis, strategy))
    where = dict(_named_meshes(analysis, strategy, meshes, entries))
    places = _places(analysis, where) if len(meshes.each) > 1 else NOWHERE_ELSE
    wishes, samples = _wishes_and_samples(analysis, strategy, meshes, places, entries)
    homes = {name: home for name, home in _homes(analysis, strategy, meshes, places) if not home.is_whole}
    return Configuration(meshes, homes, wishes, places, samples)


def _wishes_and_samples(
    analysis: Analysis, strategy: Strategy, meshes: Meshes, places: Places, entries: Iterable[OperatorEntry]
) -> tuple[dict[str, dict[int, Wish]], dict[str, str]]:
    """Return what nodes are to split along which axes, and where they are asked to divide samples."""
    splitting = [entry for entry in entries if entry[1].split is not None or entry[1].devices]
    last = {node.name: (number, config, node) for number, config, nodes in splitting for node in nodes}
    placing = [entry for entry in entries if entry[1].stage is not None or entry[1].devices]
    placed_by = {node.name: number for number, _, nodes in placing for node in nodes}
    wishes: dict[str, dict[int, Wish]] = {}
    samples: dict[str, str] = {}
    for name, (number, config, node) in last.items():
        at, mesh = f"ops[{number}]", meshes.each[places.nodes.get(name, 0)]
        if config.devices and placed_by[name] != number:
            raise BadStrategy(
                f"{name!r} is divided among devices of its own, and runs where another entry says",
                at=f"{at}: devices",
                fix="write `split` in the last entry that says where it runs",
            )
        split = _named_split(config, strategy, mesh, at)
        for dimension, along in split.items():
            _check_parts(strategy, mesh, "" if config.devices else along, name, f"{at}: split: {dimension}")
        try:
            wishes[name] = wishes_of(analysis, node, split, mesh, at)
        except BadStrategy as refused:
            if not name.startswith(f"{config.op}/"):
                raise
            raise _inner_refusal(analysis, config, split, mesh, refused) from refused
        if BATCH in split and mesh.size(REPLICAS) > 1:
            samples[name] = f"{at}: split: {BATCH}"
    return wishes, samples


def _inner_refusal(
    analysis: Analysis, config: OpConfig, split: Mapping[str, int | str], mesh: Mesh, refused: BadStrategy
) -> BadStrategy:
    """Say of an operator that is written as others which of these can be split so."""
    takers = []
    for node in forward_nodes(analysis.training, analysis.main):
        if node.name.startswith(f"{config.op}/"):
            with suppress(BadStrategy):
                wishes_of(analysis, node, split, mesh, refused.at)
                takers.append(node.name)
    lists = f"`partc inspect --groups` lists what `{config.op}/*` are, and what each may split"
    return BadStrategy(
        f"{config.op!r} is written as other operators, not all of which can be split so: {refused.what}",
        at=refused.at,
        fix=f"name those that can, of {some_of(takers)}; {lists}" if takers else lists,
    )


def _named_split(config: OpConfig, strategy: Strategy, mesh: Mesh, at: str) -> dict[str, int | str]:
    """Return what an entry splits; of devices of its own, along which axes."""
    if config.devices:
        return dict(own_axes(config, strategy, names_of(mesh), at))
    assert config.split is not None, "it was left out"
    return config.split


def _check_parts(strategy: Strategy, mesh: Mesh, along: int | str, what: str, at: str) -> None:
    """Refuse a mesh axis that divides nothing, or into other parts than the grid's, on the mesh of this."""
    for name, size in mesh.grid:
        expected = strategy.mesh.get(name, size if name == FIRST_AXIS else max(size, 2))
        if name in str(along).split("*") and size != expected:
            raise BadStrategy(
                f"{what!r} is to be divided along {name!r}, but is on devices that are {size} along it",
                at=at,
                fix="write at which `stage` the operator runs, or its `devices` and the number of parts",
            )


def _operator_entries(analysis: Analysis, strategy: Strategy) -> Iterable[OperatorEntry]:
    named: dict[str, list[gs.Node]] = {}
    for node in analysis.training.graph.nodes:
        named.setdefault(node.name, []).append(node)
    forward = {node.name for node in forward_nodes(analysis.training, analysis.main)}
    for number, config in enumerate(strategy.ops):
        if config == OpConfig(config.op):
            raise BadStrategy(
                f"nothing is asked for {config.op!r}",
                at=f"ops[{number}]",
                fix="write its `split`, `stage` or `devices`, or remove the entry",
            )
        nodes = named.get(config.op) or _matching(analysis, config, forward, f"ops[{number}]")
        yield number, config, nodes


def _named_meshes(
    analysis: Analysis, strategy: Strategy, meshes: Meshes, entries: Iterable[OperatorEntry]
) -> Iterable[tuple[str, int]]:
    """Yield the nodes whose mesh a strategy names, and its number."""
    for number, config, nodes in entries:
        at = f"ops[{number}]"
        if config.stage is not None:
            _check_stage(config, strategy, at)
        mesh = number_of(config, strategy, meshes, analysis.workers, at)
        if mesh is None:
            continue
        for node in nodes:
            _check_is_placed(analysis, node, at)
            yield node.name, mesh


def _places(analysis: Analysis, where: Mapping[str, int]) -> Places:
    """Return the mesh of every node and variable, given that of some nodes.

    Each change of the mesh on the way forward is a stage of its own, so that operators on one mesh before and
    behind others on another are not taken for one.
    """
    forward = [node.name for node in forward_nodes(analysis.training, analysis.main)]
    mesh_of = [0]  # by stage
    stage_of: dict[str, int] = {}
    for name in forward:
        if name in where:
            if where[name] != mesh_of[-1]:
                mesh_of.append(where[name])
            stage_of[name] = len(mesh_of) - 1
    last = {mesh: stage for stage, mesh in enumerate(mesh_of)}
    for name, mesh in where.items():
        if name not in stage_of:
            if mesh not in last:
                last[mesh] = len(mesh_of)
                mesh_of.append(mesh)
            stage_of[name] = last[mesh]
    places = place_nodes(analysis, stage_of, len(mesh_of))
    return Places(
        {name: mesh_of[stage] for name, stage in places.nodes.items()},
        {name: mesh_of[stage] for name, stage in places.variables.items()},
    )


def _check_stage(config: OpConfig, strategy: Strategy, at: str) -> None:
    stages = strategy.stages if strategy.mesh else 0
    if config.devices:
        raise BadStrategy("a stage and devices of its own", at=f"{at}: stage", fix="write one of the two")
    if config.stage is not None and config.stage >= stages:
        fix = f"number them from 0 to {stages - 1}, or ask for more stages"
        raise BadStrategy(f"stage {config.stage} of {stages}", at=f"{at}: stage", fix=fix)


def _check_is_placed(analysis: Analysis, node: gs.Node, at: str) -> None:
    if node.name not in analysis.main:
        raise BadStrategy(
            f"{node.name!r} is of an update, which runs where its variable is kept",
            at=f"{at}: op",
            fix="name ops of the way forward, or of the gradients",
        )


def _check_samples(analysis: Analysis, meshes: Meshes) -> None:
    """Replicas of a batch each, and micro-batches of the same samples, are everywhere as many."""
    ways_out = [
        way
        for is_bound, way in (
            (analysis.per_replica, "compile with --batch global"),
            (meshes.microbatches > 1, "no micro-batches"),
        )
        if is_bound
    ]
    for mesh in meshes.each:
        if ways_out and mesh.size(REPLICAS) != meshes.replicas:
            raise BadStrategy(
                f"operators whose samples are divided among {mesh.size(REPLICAS)} devices, and others among "
                f"{meshes.replicas}",
                at="ops",
                fix=f"let all divide the samples alike, or {' and '.join(ways_out)}",
            )


def _check_microbatches(strategy: Strategy) -> None:
    if MICROBATCHES in strategy.mesh:
        raise BadStrategy(
            f"a mesh axis called {MICROBATCHES!r}: micro-batches follow each other on the same workers",
            at="mesh",
            fix='write "microbatches" beside the mesh',
        )


def _check_stages(strategy: Strategy, workers: int) -> None:
    if strategy.stages > 1 and not strategy.mesh:
        raise BadStrategy(
            f"{strategy.stages} stages, but no mesh that each of them is",
            at="stages",
            fix='name the mesh of each, such as "mesh": '
            f'{{"data": 1, "tensor": {workers // strategy.stages}}}, or remove the stages: devices of '
            "operators' own say where these run",
        )


def _check_needs_no_mesh(strategy: Strategy, workers: int) -> None:
    if strategy.variables or strategy.devices or strategy.divides_more:
        raise BadStrategy(
            "variables, ops or batches are to be split, or devices to be taken, but there is no mesh",
            at="mesh",
            fix="name its axes and their parts, such as "
            f'{{"data": 1, "tensor": {workers // strategy.stages}}}',
        )


def _check_has_no_servers(strategy: Strategy) -> None:
    for name, how in strategy.parameters.items():
        if how.method == "servers":
            raise BadStrategy(
                f"{name!r} on servers, which a mesh does not have",
                at=f"parameters: {name}: method",
                fix='write "all_reduce", or remove the mesh and the devices of operators\' own',
            )


def _homes(
    analysis: Analysis, strategy: Strategy, meshes: Meshes, places: Places
) -> Iterable[tuple[str, Layout]]:
    names = [name for name, _ in meshes.each[0].grid]
    variables = analysis.training.variables
    for name, splits in strategy.variables.items():
        if name not in variables:
            fix = f"use one of {some_of(variables)}, or remove the entry"
            raise BadStrategy(f"unknown variable {name!r}", at=f"variables: {name}", fix=fix)
        if unknown := splits.keys() - set(names):
            fix = f"use one of {some_of(names)}"
            raise BadStrategy(f"unknown mesh axis {min(unknown)!r}", at=f"variables: {name}", fix=fix)
        shape = variables[name].shape
        for axis, split in splits.items():
            if not 0 <= split.axis < len(shape) or shape[split.axis] % split.outer:
                raise BadStrategy(
                    f"{_dimension(split)} of a variable shaped {list(shape)}",
                    at=f"variables: {name}: {axis}",
                    fix="name an axis that it has, and blocks that divide it",
                )
        mesh = meshes.each[places.variables.get(name, 0)]
        _check_parts(strategy, mesh, "*".join(splits), name, f"variables: {name}")
        if not mesh.divides(_home(splits, mesh, shape), shape):
            raise BadStrategy(
                f"a variable shaped {list(shape)} cannot be cut so: more parts than entries",
                at=f"variables: {name}",
                fix="split another axis, or along a mesh axis of another size",
            )
    for variable, parameter in analysis.followers.items():
        mesh = meshes.each[places.variables.get(variable, 0)]
        if variable in strategy.variables or parameter not in strategy.variables:
            yield variable, _home(strategy.variables.get(variable, {}), mesh, variables[variable].shape)
        else:
            home = _home(strategy.variables[parameter], mesh, variables[parameter].shape)
            yield variable, home_of_follower(home, variables[parameter].shape, variables[variable].shape)


def _home(splits: Mapping[str, AxisSplit], mesh: Mesh, shape: Sequence[int]) -> Layout:
    """Return where a variable of a shape is kept; an axis that does not divide is cut unevenly."""
    splits_by_axis = (splits.get(name) if size > 1 else None for name, size in mesh.grid)
    placements = (
        Replicate() if split is None else Split(split.axis, split.outer) for split in splits_by_axis
    )
    return mesh.nest_splits(Layout(mesh.name, *placements), shape)


def _dimension(split: AxisSplit) -> str:
    return f"axis {split.axis}" + (f" behind {split.outer} blocks" if split.outer > 1 else "")


def _matching(analysis: Analysis, config: OpConfig, forward: Collection[str], at: str) -> list[gs.Node]:
    """Return the nodes under a name that no node has, else those that it fits as a pattern.

    A node that was said in primitives has left these under its name, and among them what its gradients'
    averages over replicas are made by: these run where they are read. A pattern that says what is split is
    of the way forward, if it fits anything there: gradients have other dimensions, and follow.
    """
    all_nodes = analysis.training.graph.nodes
    pattern = re.compile("".join(WILDCARDS.get(letter, re.escape(letter)) for letter in config.op))
    nodes = [node for node in all_nodes if node.name.startswith(f"{config.op}/")]
    if not nodes:
        fitting = [node for node in all_nodes if pattern.fullmatch(node.name)]
        nodes = [node for node in fitting if config.split and node.name in forward] or fitting
    if config.devices or config.stage is not None:  # of what fits, that which an entry can place
        nodes = [node for node in nodes if node.name in analysis.main] or nodes
    if not nodes:
        fix = "`partc inspect --groups` lists the names; `*` stands for any part of one"
        raise BadStrategy(f"no op is called {config.op!r}", at=f"{at}: op", fix=fix)
    return nodes
