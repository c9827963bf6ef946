"""Turn what a strategy says in words into layouts of variables and wishes of ops.

    "variables": {"layer0.weight": {"tensor": {"axis": 1}}}         kept by columns along axis tensor
    "ops": [{"op": "layer*/MatMul", "split": {"out:1": "tensor"}}]   what nodes of these names split

A dimension is `batch` (the samples), `out:A` (axis A of the output) or `in:I:A` (axis A of operand I,
which is summed); `/N` behind it means the inner factor behind N blocks. It is split along a mesh axis,
by its name, or by the number of its parts: then along the first axis of as many that is free. Ops with
devices of their own have a mesh of as many parts (layouts/strategy_meshes.py).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod

import onnx_graphsurgeon as gs

from partc.cost.strategy import AxisSplit, OpConfig, Strategy
from partc.passes.analysis import Analysis
from partc.passes.graph.facts import Facts
from partc.passes.layouts.configuration import (
    NOWHERE_ELSE,
    Configuration,
    Places,
    Wish,
    data_parallel,
    home_of_follower,
)
from partc.passes.layouts.decide_layouts import decide_axes, decide_by_wish, divides, whole_axis
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
from partc.passes.rules.sharding_rules import node_facts
from partc.passes.search.forward_nodes import forward_nodes
from partc.runtime.errors import BadStrategy

DIMENSION = re.compile(
    r"batch|(?:out:(?P<out>\d+)|in:(?P<operand>\d+):(?P<axis>\d+))(?:/(?P<outer>[1-9]\d*))?"
)
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
    asked = list(_asked(analysis, strategy))
    where = dict(_where(analysis, strategy, meshes, asked))
    places = _places(analysis, where) if len(meshes.each) > 1 else NOWHERE_ELSE
    wishes, samples = _divided(analysis, strategy, meshes, places, asked)
    homes = {name: home for name, home in _homes(analysis, strategy, meshes, places) if not home.is_whole}
    return Configuration(meshes, homes, wishes, places, samples)


def _divided(
    analysis: Analysis, strategy: Strategy, meshes: Meshes, places: Places, asked: Iterable[OperatorEntry]
) -> tuple[dict[str, dict[int, Wish]], dict[str, str]]:
    """Return what nodes are to split along which axes, and where they are asked to divide samples."""
    splitting = [entry for entry in asked if entry[1].split is not None or entry[1].devices]
    last = {node.name: (number, config, node) for number, config, nodes in splitting for node in nodes}
    placing = [entry for entry in asked if entry[1].stage is not None or entry[1].devices]
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
        wishes[name] = _wishes_of(analysis, node, split, mesh, at)
        if BATCH in split and mesh.size(REPLICAS) > 1:
            samples[name] = f"{at}: split: {BATCH}"
    return wishes, samples


def _check_parts(strategy: Strategy, mesh: Mesh, along: int | str, what: str, at: str) -> None:
    """Refuse a mesh axis that divides nothing, or into other parts than the grid's, on the mesh of this."""
    for name, size in mesh.grid:
        wanted = strategy.mesh.get(name, size if name == FIRST_AXIS else max(size, 2))
        if name in str(along).split("*") and size != wanted:
            raise BadStrategy(
                f"{what!r} is to be divided along {name!r}, but is on devices that are {size} along it",
                at=at,
                fix="write at which `stage` the operator runs, or its `devices` and the number of parts",
            )


def _asked(analysis: Analysis, strategy: Strategy) -> Iterable[OperatorEntry]:
    named: dict[str, list[gs.Node]] = {}
    for node in analysis.training.graph.nodes:
        named.setdefault(node.name, []).append(node)
    for number, config in enumerate(strategy.ops):
        nodes = named.get(config.op) or _matching(analysis, config, f"ops[{number}]")
        yield number, config, nodes


def _where(
    analysis: Analysis, strategy: Strategy, meshes: Meshes, asked: Iterable[OperatorEntry]
) -> Iterable[tuple[str, int]]:
    """Yield the nodes whose mesh a strategy names, and its number."""
    for number, config, nodes in asked:
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
    wished: dict[str, int] = {}
    for name in forward:
        if name in where:
            if where[name] != mesh_of[-1]:
                mesh_of.append(where[name])
            wished[name] = len(mesh_of) - 1
    last = {mesh: stage for stage, mesh in enumerate(mesh_of)}
    for name, mesh in where.items():
        if name not in wished:
            if mesh not in last:
                last[mesh] = len(mesh_of)
                mesh_of.append(mesh)
            wished[name] = last[mesh]
    places = place_nodes(analysis, wished, len(mesh_of))
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
    if strategy.variables or strategy.ops or strategy.stages > 1 or strategy.microbatches > 1:
        raise BadStrategy(
            "variables, ops or batches are to be split, but there is no mesh to split them along",
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
            fix = f"use one of {_some(variables)}, or remove the entry"
            raise BadStrategy(f"unknown variable {name!r}", at=f"variables: {name}", fix=fix)
        if unknown := splits.keys() - set(names):
            fix = f"use one of {_some(names)}"
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
    asked = (splits.get(name) if size > 1 else None for name, size in mesh.grid)
    placements = (Replicate() if split is None else Split(split.axis, split.outer) for split in asked)
    return mesh.nest_splits(Layout(mesh.name, *placements), shape)


def _dimension(split: AxisSplit) -> str:
    return f"axis {split.axis}" + (f" behind {split.outer} blocks" if split.outer > 1 else "")


def _matching(analysis: Analysis, config: OpConfig, at: str) -> list[gs.Node]:
    """Return the nodes under a name that no node has, else those that it fits as a pattern.

    A node that was said in primitives has left these under its name, and among them what its gradients'
    averages over replicas are made by: these run where they are read.
    """
    all_nodes = analysis.training.graph.nodes
    pattern = re.compile("".join(WILDCARDS.get(letter, re.escape(letter)) for letter in config.op))
    nodes = [node for node in all_nodes if node.name.startswith(f"{config.op}/")]
    nodes = nodes or [node for node in all_nodes if pattern.fullmatch(node.name)]
    if config.devices or config.stage is not None:  # of what fits, that which an entry can place
        nodes = [node for node in nodes if node.name in analysis.main] or nodes
    if not nodes:
        fix = "`partc inspect --groups` lists the names; `*` stands for any part of one"
        raise BadStrategy(f"no op is called {config.op!r}", at=f"{at}: op", fix=fix)
    return nodes


def _named_split(config: OpConfig, strategy: Strategy, mesh: Mesh, at: str) -> dict[str, int | str]:
    """Return what an entry splits; of devices of its own, along which axes."""
    if config.devices:
        return dict(own_axes(config, strategy, names_of(mesh), at))
    assert config.split is not None, "it was left out"
    return config.split


def _wishes_of(
    analysis: Analysis, node: gs.Node, split: Mapping[str, int | str], mesh: Mesh, at: str
) -> dict[int, Wish]:
    """Return what a node splits along every mesh axis: nothing along those that are not named."""
    wishes = {axis: Wish(None) for axis in range(len(mesh.grid))}
    known = node_facts(node, analysis.facts, analysis.zeros)
    asked = [whole_axis(node) for _ in mesh.axes]
    for dimension, parts in split.items():
        where = f"{at}: split: {dimension}"
        wish = _wish(node, analysis.facts, dimension, where)
        for axis in _mesh_axes(mesh, parts, wishes, where):
            if mesh.size(axis) == 1:
                continue
            if wish is None:
                _check_divides_samples(mesh, axis, where)
                del wishes[axis]
                continue
            wishes[axis] = wish
            decision = decide_by_wish(known, wish, mesh.size(axis))
            asked[axis] = decision or whole_axis(node)
            if decision is None or not divides(mesh, known, decide_axes(mesh, asked)):
                parts_asked = prod(mesh.size(a) for a, other in wishes.items() if other == wish)
                raise BadStrategy(
                    f"{node.op} {node.name!r} cannot split {dimension} into {parts_asked} parts",
                    at=where,
                    fix="`partc inspect --groups` lists what each op may split",
                )
    return wishes


def _check_divides_samples(mesh: Mesh, axis: int, at: str) -> None:
    if axis != REPLICAS:
        raise BadStrategy(
            f"samples along {mesh.axes[axis][0]!r}, which does not tell replicas apart",
            at=at,
            fix=f"divide them along {mesh.axes[REPLICAS][0]!r}, the mesh's first axis",
        )


def _wish(node: gs.Node, facts: Facts, dimension: str, at: str) -> Wish | None:
    """Return what a dimension means for a node; None for the samples, which data parallelism splits."""
    found = DIMENSION.fullmatch(dimension)
    if found is None:
        fix = "write batch, out:A or in:I:A, with /N behind it for the factor behind N blocks"
        raise BadStrategy(f"no dimension {dimension!r}", at=at, fix=fix)
    if dimension == BATCH:
        return None
    is_output = found["out"] is not None
    operand = None if is_output else int(found["operand"])
    if operand is not None and operand >= len(node.inputs):
        fix = f"it has operands 0 to {len(node.inputs) - 1}"
        raise BadStrategy(f"{node.name!r} has no operand {operand}", at=at, fix=fix)
    axis = int(found["out"] if is_output else found["axis"])
    tensor = node.outputs[0] if operand is None else node.inputs[operand]
    if axis >= (rank := len(facts.shape(tensor.name))):
        fix = f"axes count from 0: {tensor.name!r} has {rank}"
        raise BadStrategy(f"{node.name!r} has no dimension {dimension}", at=at, fix=fix)
    return Wish(Split(axis, int(found["outer"] or 1)), operand, at)


def _mesh_axes(mesh: Mesh, parts: int | str, used: Mapping[int, Wish], at: str) -> list[int]:
    """Return the mesh axes that a dimension is split along."""
    names = [name for name, _ in mesh.grid]
    if isinstance(parts, str):
        if unknown := [name for name in parts.split("*") if name not in names]:
            raise BadStrategy(f"unknown mesh axis {unknown[0]!r}", at=at, fix=f"use one of {_some(names)}")
        asked = [names.index(name) for name in parts.split("*")]
        if taken := [a for n, a in enumerate(asked) if a in asked[:n] or _is_taken(used, a)]:
            raise BadStrategy(
                f"mesh axis {names[taken[0]]!r} splits two dimensions of one op",
                at=at,
                fix="name each axis once for an op",
            )
        return asked
    free = [a for a in range(len(names)) if not _is_taken(used, a) and mesh.size(a) == parts]
    if not free and parts != 1:
        sizes = ", ".join(f"{name} has {size}" for name, size in mesh.grid)
        raise BadStrategy(
            f"no mesh axis of {parts} parts is left", at=at, fix=f"use those there are: {sizes}"
        )
    return free[:1]


def _is_taken(used: Mapping[int, Wish], axis: int) -> bool:
    """Tell whether an axis splits a dimension already; one that divides samples has no wish."""
    return axis not in used or used[axis].split is not None


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - 10} more" if len(listed) > 10 else ""
    return f"{', '.join(repr(name) for name in listed[:10])}{more}"
