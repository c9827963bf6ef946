"""From what is known of a step and a strategy to the distributed step."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import onnx_graphsurgeon as gs

from partc.cost.strategy import Strategy, Synchronisation
from partc.passes.analysis import Analysis
from partc.passes.configure import configure
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.indexed_rows.expected_rows import ExpectedRows
from partc.passes.layouts.aggregate_partials import aggregate_partials
from partc.passes.layouts.check_wishes import check_wishes
from partc.passes.layouts.configuration import Configuration, Wish, data_parallel, home_of_follower
from partc.passes.layouts.decide_on_servers import NotServable
from partc.passes.layouts.decisions import Decision
from partc.passes.layouts.laid_out_graph import LaidOutGraph, Synchronised
from partc.passes.layouts.layouts import REPLICAS, Layout, Partial, Placement, Split
from partc.passes.layouts.propagate_layouts import propagate_layouts
from partc.passes.lowering.lower import lower
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.lowering.round_sums import round_sums
from partc.passes.scheduling.bucket_communications import copy_where_shared
from partc.runtime.errors import BadStrategy, BadUsage
from partc.runtime.plan.program import Aggregation, Site


def declare_gradients(training: TrainingGraph) -> None:
    """Give dense gradients the shape of their parameter, which inference loses behind a Slice by data."""
    tensors = training.graph.tensors()
    for name, gradient in training.gradients.items():
        if gradient.dense in tensors and isinstance(tensors[gradient.dense], gs.Variable):
            tensors[gradient.dense].shape = list(training.variables[name].shape)


def check_one_batch(training: TrainingGraph, aggregation: Aggregation, strategy: str) -> None:
    """Refuse what tells replicas apart where all ranks together are one device.

    `strategy`: the one that has no other batch than one for all; empty: --batch asks for that.
    """
    asked = strategy or "--batch global"
    instead = "use --strategy allreduce" if strategy else "leave --batch out"
    averaged = {"--sum-dense": aggregation.average_dense, "--sum-sparse": aggregation.average_sparse}
    if sums := " and ".join(option for option, is_averaged in averaged.items() if not is_averaged):
        raise BadUsage(
            "gradients are to be summed over replicas, but one batch for all has one gradient",
            at=f"{sums} with {asked}",
            fix=f"leave {sums} out, or {instead}: every replica then has a batch and a gradient of its own",
        )
    if training.shard_inputs:
        raise BadUsage(
            "each replica is to read a shard of its own, but one batch is for all",
            at=f"input {next(iter(training.shard_inputs))!r} with {asked}",
            fix=f"{instead}: every replica then has a batch of its own",
        )


def drop_unservable(analysis: Analysis) -> Analysis:
    """Try everything on servers; what cannot run there is found out by trying."""
    while analysis.servable:
        try:
            lay_out(analysis, dict.fromkeys(analysis.servable, Synchronisation("servers")))
            return analysis
        except NotServable as refusal:
            servable = analysis.servable - {refusal.parameter}
            analysis = replace(analysis, servable=servable)
    return analysis


def lay_out(
    analysis: Analysis, chosen: Mapping[str, Synchronisation], configuration: Configuration | None = None
) -> LaidOutGraph:
    """Give every tensor a layout. `chosen`: parameter -> how it is synchronised."""
    on_servers = {p for p, how in chosen.items() if how.method == "servers" and p in analysis.servable}
    owner = {v: p for v, p in analysis.followers.items() if p in on_servers}
    graph = LaidOutGraph(
        analysis.training,
        analysis.facts,
        analysis.zeros,
        configuration or data_parallel(analysis.replicas),
        Synchronised(chosen, {v: p for v, p in owner.items() if p is not None}),
        analysis.main,
        analysis.stored,
    )
    propagate_layouts(graph, analysis.per_replica)
    return graph


def lay_out_strategy(
    analysis: Analysis, strategy: Strategy, samples: dict[int, Mapping[str, Wish]] | None = None
) -> LaidOutGraph:
    """Give every tensor the layout that a strategy asks for.

    `samples`: what samples ask of nodes, by their parts, is looked up there, and noted, if it is given for
    steps of the same analysis. Raises BadStrategy where what it says cannot be held.
    """
    configuration, graph = _configured(analysis, strategy, {} if samples is None else samples)
    graph = graph or lay_out(analysis, strategy.parameters, configuration)
    check_wishes(graph)
    return graph


def _configured(
    analysis: Analysis, strategy: Strategy, samples: dict[int, Mapping[str, Wish]]
) -> tuple[Configuration, LaidOutGraph | None]:
    """Return what a strategy asks for, and the layouts of it, if they had to be looked at."""
    configuration = configure(analysis, strategy)
    own = any(config.devices for config in strategy.ops)
    configuration = _divide_samples(analysis, configuration, samples, analysis.main if own else frozenset())
    if not own:
        return configuration, None
    listed = {v for v, p in analysis.followers.items() if not strategy.variables.keys().isdisjoint({v, p})}
    graph = lay_out(analysis, strategy.parameters, configuration)
    weights = [{n: s for n, s in of_axis.items() if n not in listed} for of_axis in _divided(graph)]
    resident = _keep(configuration, graph, analysis, weights)
    if resident.homes != configuration.homes:
        graph = lay_out(analysis, strategy.parameters, resident)
    of_other_axes = [follow_readers(graph, a, {*listed, *of_axis}) for a, of_axis in enumerate(weights) if a]
    followed = _keep(resident, graph, analysis, [{}, *of_other_axes])
    return followed, graph if followed.homes == resident.homes else None


def _divide_samples(
    analysis: Analysis,
    configuration: Configuration,
    samples: dict[int, Mapping[str, Wish]],
    all_of: frozenset[str],
) -> Configuration:
    """Let operators divide samples along their mesh's first axis where they are asked to, and all of these.

    Of what they read others may have no parts.
    """
    sample_nodes = configuration.samples
    if analysis.per_replica or not (sample_nodes or all_of):
        return configuration
    wishes = {name: dict(of_node) for name, of_node in configuration.wishes.items()}
    for number, mesh in enumerate(configuration.meshes.each):
        names = [
            n
            for n in {**sample_nodes, **dict.fromkeys(all_of)}
            if configuration.places.nodes.get(n, 0) == number
        ]
        if (parts := mesh.size(REPLICAS)) == 1 or not names:
            continue
        if parts not in samples:
            _check_has_samples(
                analysis, parts, next((sample_nodes[n] for n in names if n in sample_nodes), "ops")
            )
            alone = lay_out(analysis, {}, data_parallel(parts))
            samples[parts] = {
                name: wish
                for name, own in alone.decisions.items()
                if (wish := _wish_for_samples(own)) is not None
            }
        for name in names:
            wish = samples[parts].get(name)
            if wish is not None and (name in all_of or wish.split is not None):
                wishes.setdefault(name, {}).setdefault(REPLICAS, replace(wish, at=sample_nodes.get(name, "")))
    return replace(configuration, wishes=wishes)


def _check_has_samples(analysis: Analysis, parts: int, at: str) -> None:
    samples = analysis.fewest_samples()
    if samples is not None and samples < parts:
        raise BadStrategy(
            f"samples are to be divided among {parts} devices, and the batch has {samples}",
            at=at,
            fix=f"let {samples} devices divide them at most, or use a batch of {parts} or more",
        )


def _wish_for_samples(decision: Decision) -> Wish | None:
    """Return what data parallelism divides of a node: of its output, or of an operand that it sums.

    None where it adds sums that are still to be made: they are made behind it.
    """
    for operand, layout in ((None, decision.outputs[0]), *enumerate(decision.inputs)):
        if isinstance(split := layout.along(REPLICAS), Split):
            return Wish(split, operand)
    return None if isinstance(decision.outputs[0].along(REPLICAS), Partial) else Wish(None)


def _divided(graph: LaidOutGraph) -> list[dict[str, Split]]:
    """Return by mesh axis how ops divide the parameters that they read, where they were asked to divide."""
    splits: list[dict[str, Split]] = [{} for _ in graph.meshes.each[0].grid]
    for node in graph.training.graph.nodes:
        if node.name not in graph.configuration.wishes:
            continue
        for tensor, layout in zip(node.inputs, graph.decisions[node.name].inputs, strict=True):
            is_there = (
                tensor.name in graph.training.gradients and graph.layout(tensor.name).site == layout.site
            )
            for axis, split in layout.splits() if is_there else ():
                if axis < len(splits) and graph.meshes.divides(layout, graph.facts.shape(tensor.name)):
                    splits[axis].setdefault(tensor.name, split)
    return splits


def _keep(
    configuration: Configuration,
    graph: LaidOutGraph,
    analysis: Analysis,
    splits: Sequence[Mapping[str, Split]],
) -> Configuration:
    """Return the configuration under which parameters, and what follows them, are kept in such parts."""
    homes = dict(configuration.homes)
    shapes = {name: variable.shape for name, variable in analysis.training.variables.items()}
    for axis, of_axis in enumerate(splits):
        for parameter, split in of_axis.items():
            home = Layout(graph.layout(parameter).site).with_along(axis, split)
            for name in {parameter, *(n for n, leader in analysis.followers.items() if leader == parameter)}:
                own = homes.get(name, Layout(home.site))
                part = home_of_follower(home, shapes[parameter], shapes[name]).along(axis)
                mesh, joint = configuration.meshes.of(home.site), own.with_along(axis, part)
                tried = (joint, mesh.nest_splits(joint, shapes[name]), own)
                homes[name] = next(layout for layout in tried if mesh.divides(layout, shapes[name]))
    return replace(configuration, homes={name: home for name, home in homes.items() if not home.is_whole})


def lower_step(
    analysis: Analysis,
    strategy: Strategy,
    expected: Mapping[str, ExpectedRows] = MappingProxyType({}),
    sessions: bool = False,
) -> LoweredGraph:
    """Return the distributed step under a strategy, ready to be scheduled.

    `expected`: rows on their way, by sparse parameter, for prices alone. `sessions`: counters live on
    servers, which several sessions share.
    """
    graph = lay_out_strategy(analysis, strategy)
    aggregate_partials(graph)
    lowered = lower(graph, expected, sessions)
    lowered.native, lowered.decisions = dict(graph.layouts), dict(graph.decisions)
    copy_where_shared(lowered, sessions)
    if strategy.round_sums:
        round_sums(lowered, analysis.training, analysis.facts, analysis.main, strategy.round_sums)
    return lowered


def follow_readers(graph: LaidOutGraph, axis: int, chosen: Collection[str]) -> dict[str, Split]:
    """Return where each parameter beside those `chosen` is split along a mesh axis: as all readers want it.

    Needs layouts and decisions. One whose readers differ, or that does not divide, is left out.
    """
    placements: dict[str, set[tuple[Site, Placement]]] = {}
    for node in graph.training.graph.nodes:
        if node.name in graph.main:
            for tensor, layout in zip(node.inputs, graph.decisions[node.name].inputs, strict=True):
                placements.setdefault(tensor.name, set()).add((layout.site, layout.along(axis)))
    return {
        name: split
        for name in graph.training.gradients
        if name not in chosen and len(placements.get(name, ())) == 1
        for site, split in placements[name]
        if isinstance(split, Split)
        and site == graph.layout(name).site
        and graph.meshes.divides(Layout(site).with_along(axis, split), graph.facts.shape(name))
    }
