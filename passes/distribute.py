"""From what is known of a step and a strategy to the distributed step."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import onnx_graphsurgeon as gs

from partc.cost.strategy import Strategy, Synchronisation
from partc.passes.analysis import Analysis
from partc.passes.configure import configure
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.indexed_rows.expected_rows import ExpectedRows
from partc.passes.layouts.aggregate_partials import aggregate_partials
from partc.passes.layouts.configuration import Configuration, data_parallel, home_of_follower
from partc.passes.layouts.decide_layouts import NotServable
from partc.passes.layouts.layouts import Layout
from partc.passes.layouts.propagate_layouts import LaidOutGraph, Synchronised, propagate_layouts
from partc.passes.lowering.lower import lower
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.bucket_communications import copy_where_shared
from partc.passes.search.follow_readers import follow_readers
from partc.runtime.errors import BadUsage
from partc.runtime.plan.program import Aggregation


def declare_gradients(training: TrainingGraph) -> None:
    """Give dense gradients the shape of their parameter, which inference loses behind a Slice by data."""
    tensors = training.graph.tensors()
    for name, gradient in training.gradients.items():
        if gradient.dense in tensors and isinstance(tensors[gradient.dense], gs.Variable):
            tensors[gradient.dense].shape = list(training.variables[name].shape)


def check_one_batch(training: TrainingGraph, aggregation: Aggregation) -> None:
    """Refuse what tells replicas apart where all ranks together are one device."""
    if not (aggregation.average_dense and aggregation.average_sparse):
        raise BadUsage(
            "gradients are to be summed over replicas, but one batch for all has one gradient",
            at="average_dense, average_sparse and --batch global",
            fix="leave --batch out: every replica then has a batch and a gradient of its own",
        )
    if training.shard_inputs:
        raise BadUsage(
            "each replica is to read a shard of its own, but one batch is for all",
            at=f"input {next(iter(training.shard_inputs))!r} and --batch global",
            fix="leave --batch out: every replica then has a batch of its own",
        )


def drop_unservable(analysis: Analysis) -> Analysis:
    """Try everything on servers; what cannot run there is found out by trying."""
    while analysis.servable:
        try:
            lay_out(analysis, dict.fromkeys(analysis.servable, Synchronisation("servers")))
            return analysis
        except NotServable as refusal:
            servable = analysis.servable - {refusal.parameter}
            analysis = Analysis(**{**vars(analysis), "servable": servable})
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
    )
    propagate_layouts(graph, analysis.per_replica)
    return graph


def configuration_of(analysis: Analysis, strategy: Strategy) -> Configuration:
    """Return what a strategy asks for, variables that operators with devices of their own divide kept so."""
    configuration = configure(analysis, strategy)
    if not any(config.devices for config in strategy.ops):
        return configuration
    listed = {v for v, p in analysis.followers.items() if not strategy.variables.keys().isdisjoint({v, p})}
    graph = lay_out(analysis, strategy.parameters, configuration)
    homes = dict(configuration.homes)
    shapes = {name: variable.shape for name, variable in analysis.training.variables.items()}
    for axis in range(1, len(graph.meshes.each[0].grid)):
        for parameter, split in follow_readers(graph, axis, listed).items():
            home = Layout(graph.layout(parameter).site).with_along(axis, split)
            for name in (n for n, leader in analysis.followers.items() if parameter in (n, leader)):
                own = homes.get(name, Layout(graph.layout(name).site))
                kept = home_of_follower(home, shapes[parameter], shapes[name]).along(axis)
                homes[name] = own.with_along(axis, kept)
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
    graph = lay_out(analysis, strategy.parameters, configuration_of(analysis, strategy))
    aggregate_partials(graph)
    lowered = lower(graph, expected, sessions)
    lowered.native = dict(graph.layouts)
    copy_where_shared(lowered, sessions)
    return lowered
