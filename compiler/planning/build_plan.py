"""Make the plan of a distributed step: program, ranks, variables, data."""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import onnx

from partc.compiler.output.plan_files import PlanFiles
from partc.compiler.output.title_segments import SegmentTitler
from partc.compiler.planning.describe_ranks import OwnedRows, describe_groups, describe_ranks, ranks_at_sites
from partc.compiler.planning.price_messages import MessagePrices
from partc.cost.cluster.cluster import Cluster, ranks_of
from partc.cost.cluster.profiles import PER_COMMUNICATION_S
from partc.cost.simulation.measured_kernels import NO_TIMES, KernelTimes, prices_sha256
from partc.cost.simulation.roofline import node_s
from partc.cost.strategy import Strategy
from partc.passes.analysis import Analysis
from partc.passes.indexed_rows.indexed_slices import sum_rows_function
from partc.passes.layouts.layouts import MICROBATCHES, REPLICAS, PerReplica, Split
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.microbatches.find_repeated import Repeated, find_repeated
from partc.passes.microbatches.join_microbatches import join_microbatches
from partc.passes.microbatches.take_turns import Turn, take_turns
from partc.passes.scheduling.bucket_communications import (
    BUCKET_BYTES,
    BUCKET_S,
    LEAST_BUCKET_BYTES,
    Bucket,
    bucket_communications,
    whole_shapes,
)
from partc.passes.scheduling.divide_pieces import BucketPiece, divide_pieces
from partc.passes.scheduling.join_sums import join_sums
from partc.passes.scheduling.levels import HostGrid
from partc.passes.scheduling.make_program import Program, ProgramMaker
from partc.passes.scheduling.order_by_time import lead_first, order_by_time, ready_slots, step_s
from partc.passes.scheduling.outline_segments import SegmentOutliner
from partc.passes.scheduling.place_gathers import gather_again, place_gathers
from partc.passes.scheduling.recompute import Cutter, Recomputation
from partc.passes.scheduling.schedule import Chunk, Communication, Item, schedule
from partc.passes.scheduling.write_segments import SegmentWriter
from partc.passes.search.operators.forward_nodes import forward_nodes
from partc.runtime.plan.program import PLAN_FORMAT, Output, Plan, Recomputed
from partc.runtime.plan.variables import PlanVariable, Stored


def build_plan(
    analysis: Analysis,
    lowered: LoweredGraph,
    strategy: Strategy,
    cluster: Cluster,
    sizes: Mapping[str, int],
    files: PlanFiles | None,
    times: KernelTimes | None = None,
) -> Plan:
    """Schedule, bucket and cut the step; describe every rank. Writes segments into the folder.

    `sizes`: a value for every symbolic size. `files` None: nothing is written, and the plan is good for being
    simulated alone: with these `times` of kernels, or with any.
    """
    rows = owned_rows(strategy, cluster)
    program, recomputed = _make_program(analysis, lowered, strategy, rows, cluster, files, times)
    groups = describe_groups(cluster, lowered, program.instructions)
    training = analysis.training
    return Plan(
        format=PLAN_FORMAT,
        model="" if files is None else files.save_model(training),
        batch=strategy.batch,
        replicas=analysis.replicas,
        sizes=dict(sizes),
        loss=training.loss,
        ranks=describe_ranks(training, lowered, program, rows, cluster, groups),
        groups=groups,
        instructions=tuple(program.instructions),
        buffers=tuple(program.buffers),
        slices=tuple(program.slices),
        variables=_describe_variables(analysis, strategy, files),
        data_inputs=tuple(training.data_inputs.values()),
        outputs=_describe_outputs(lowered, program),
        predicted_step_s=0.0,
        cost_cache_sha256=prices_sha256(NO_TIMES),
        files={},
        shard_inputs=tuple(training.shard_inputs.values()),
        drawn_inputs=tuple(training.drawn_inputs.values()),
        aggregation=strategy.aggregation,
        recomputed=recomputed,
        constants=_row_ends(lowered, rows) | _moments(program),
        unread_inputs=training.unread_inputs,
        microbatches=lowered.meshes.microbatches,
    )


def owned_rows(strategy: Strategy, cluster: Cluster) -> OwnedRows:
    """Return for each parameter on servers the rows that each host's server owns."""
    hosts = [host.name for host in cluster.hosts]
    result: dict[str, tuple[tuple[int, int], ...]] = {}
    for name, choice in strategy.parameters.items():
        if choice.method != "servers":
            continue
        at = {shard.host: (shard.start, shard.stop) for shard in choice.shards}
        ranges: list[tuple[int, int]] = []
        end = 0
        for host in hosts:
            start, stop = at.get(host, (end, end))
            ranges.append((start, stop))
            end = stop
        result[name] = tuple(ranges)
    return result


def _row_ends(lowered: LoweredGraph, rows: OwnedRows) -> dict[str, tuple[int, ...]]:
    """Return the constants that tell where each server's rows end."""
    return {
        value: tuple(end for _, end in rows[constant.parameter])
        for value, constant in lowered.constants.items()
        if constant.parameter is not None and constant.holds == "row_ends"
    }


def _moments(program: Program) -> dict[str, tuple[int, ...]]:
    """Return the constants that tell every rank which micro-batch it is."""
    return {name: (number,) for number, name in enumerate(program.moments.get(MICROBATCHES, ()))}


def _make_program(
    analysis: Analysis,
    lowered: LoweredGraph,
    strategy: Strategy,
    rows: OwnedRows,
    cluster: Cluster,
    files: PlanFiles | None,
    times: KernelTimes | None,
) -> tuple[Program, Recomputed | None]:
    is_limited = strategy.recompute_bytes is not None
    if is_limited and lowered.meshes.microbatches == 1:  # else what both ways read is read all the time
        gather_again(lowered, {node.name for node in forward_nodes(analysis.training, analysis.main)})
    seconds = _durations(lowered, cluster)
    items, repeated = _in_order(analysis, lowered, rows, cluster, seconds)
    overwrites = [(state.value, state.next) for state in lowered.states]

    def in_turns(items: Sequence[Item]) -> tuple[list[Turn], set[str]]:
        placed, gathered = place_gathers(items, lowered, are_late=is_limited)
        joined = join_microbatches(placed, lowered, repeated)
        return take_turns(joined, repeated, overwrites, lowered.meshes.sites, seconds), gathered

    (turns, gathered), recomputed = in_turns(items), None
    if strategy.recompute_bytes is not None:
        limit_bytes = strategy.recompute_bytes
        search = _recomputation(analysis, lowered, repeated, limit_bytes, cluster)
        before_bytes = search.most_bytes(turns)
        if before_bytes > limit_bytes:
            cutter = Cutter(lowered, search.sizes, before_bytes)
            if repeated.count == 1:
                turns, gathered = in_turns([piece for item in items for piece in cutter.cut(item)])
            else:
                turns = [Turn(piece, turn.microbatch) for turn in turns for piece in cutter.cut(turn.item)]
            search.fit(turns)
            repeated = search.repeated
        after_bytes = search.most_bytes(turns)
        recomputed = Recomputed(limit_bytes, before_bytes, after_bytes, len(search.nodes), search.flops)
    writer = _segment_writer(analysis, lowered, cluster, turns, files, times)
    late = gathered if is_limited else ()
    return ProgramMaker(lowered, turns, repeated, _host_grid(cluster), writer, late).make(), recomputed


def _in_order(
    analysis: Analysis,
    lowered: LoweredGraph,
    rows: OwnedRows,
    cluster: Cluster,
    seconds: Callable[[Item], float],
) -> tuple[list[Item], Repeated]:
    """Bucket the communications and order what ranks do, by the graph or, where that is quicker, by time.

    Returns what there is of every micro-batch as well, once pieces are divided.
    """
    order = {node.name: index for index, node in enumerate(analysis.training.graph.nodes)}
    position_of = {copy: order[node] for copy, node in lowered.original.items()}
    in_buckets = partial(
        bucket_communications,
        whole_shapes=whole_shapes(analysis.facts, lowered),
        owned_rows=rows,
        limit_bytes=bucket_bytes(cluster),
    )
    join_sums(lowered, in_buckets, position_of, MessagePrices(lowered, cluster, _slowest_link(cluster)))
    has_times = len(lowered.meshes.each) > 1 and find_repeated(lowered).count == 1
    buckets = in_buckets(lowered)
    timed = in_buckets(lowered, slots=ready_slots(lowered, position_of, seconds)) if has_times else {}
    position_of |= divide_pieces(lowered, _divided_pieces(buckets), position_of)
    if has_times:
        position_of = lead_first(lowered, position_of)
    repeated = find_repeated(lowered)
    items = schedule(lowered, buckets, position_of, repeated)
    if has_times:
        by_time = order_by_time(lowered, timed, position_of, seconds)
        items = min(items, by_time, key=lambda items: step_s(items, lowered, seconds))
    return items, repeated


def _host_grid(cluster: Cluster) -> HostGrid:
    most = max(len(host.devices) for host in cluster.hosts)
    workers = tuple(placed.host for placed in ranks_of(cluster) if placed.replica is not None)
    return HostGrid(len(cluster.hosts), most, workers)


def bucket_bytes(cluster: Cluster) -> int:
    """Return how large buckets may be: on slow links less, so that one is sent while the next is made."""
    if len(ranks_of(cluster)) == 1:  # it sends nothing: one bucket, so that its step is not cut
        return sys.maxsize
    return int(min(BUCKET_BYTES, max(LEAST_BUCKET_BYTES, BUCKET_S * _slowest_link(cluster))))


def _slowest_link(cluster: Cluster) -> float:
    """Return the bytes per second of the slowest link between hosts, as many as there may be without one."""
    return min((link.bytes_per_s for link in cluster.links), default=sys.float_info.max)


def _divided_pieces(buckets: Mapping[str, Bucket]) -> dict[str, Sequence[BucketPiece]]:
    """Return communication -> its member's pieces, where segments read or write these."""
    return {
        node.name: pieces
        for bucket in buckets.values()
        if bucket.is_divided
        for node, pieces in zip(bucket.members, bucket.pieces, strict=True)
    }


def _durations(lowered: LoweredGraph, cluster: Cluster) -> Callable[[Item], float]:
    """Return what tells the seconds of an item: on the first worker, or over the slowest link."""
    worker = next(placed for placed in ranks_of(cluster) if placed.replica is not None)
    slowest_bytes_per_s = _slowest_link(cluster)

    def seconds(item: Item) -> float:
        values = [tensor.name for node in item.nodes for tensor in node.outputs]
        nbytes = sum(lowered.nbytes.get(value, 0) for value in values)
        if isinstance(item, Communication):
            return PER_COMMUNICATION_S + nbytes / slowest_bytes_per_s
        read = sum(lowered.nbytes.get(tensor.name, 0) for node in item.nodes for tensor in node.inputs)
        flops = sum(lowered.flops.get(node.name, 0) for node in item.nodes)
        return node_s(flops, nbytes + read, worker, cluster)

    return seconds


def _segment_writer(
    analysis: Analysis,
    lowered: LoweredGraph,
    cluster: Cluster,
    turns: Sequence[Turn],
    files: PlanFiles | None,
    times: KernelTimes | None,
) -> SegmentWriter | SegmentOutliner:
    opset = analysis.training.opset
    own = sum_rows_function(opset)  # pushed slices are summed in graphs that sum none themselves too
    functions = {function.name: function for function in (own, *analysis.training.functions)}
    functions |= lowered.functions
    if files is None:
        names_kernels = times is None or bool(times.seconds)
        return SegmentOutliner(functions, dict(lowered.shapes), names_kernels=names_kernels)
    chunks = {id(turn.item): turn.item for turn in turns if isinstance(turn.item, Chunk)}
    most = sum(1 + bool(chunk.sums) for chunk in chunks.values())
    titler = SegmentTitler(analysis, lowered, ranks_at_sites(cluster, lowered.meshes), most)

    def save(model: onnx.ModelProto, chunk: Chunk) -> str:
        title, nodes = titler.entitle(model, chunk)
        for node in nodes:
            files.segments_of.setdefault(node, []).append(title)
        return files.save_segment(model, title.name)

    on_cpu = all(device.kind == "cpu" for host in cluster.hosts for device in host.devices)
    return SegmentWriter(opset, functions, save, dict(lowered.shapes), on_cpu)


def _recomputation(
    analysis: Analysis, lowered: LoweredGraph, repeated: Repeated, limit_bytes: int, cluster: Cluster
) -> Recomputation:
    worker = next(placed for placed in ranks_of(cluster) if placed.replica is not None)

    def seconds(flops: int, touched_bytes: int) -> float:
        return node_s(flops, touched_bytes, worker, cluster)

    return Recomputation(lowered, repeated, analysis.main, limit_bytes, seconds)


def _describe_variables(
    analysis: Analysis, strategy: Strategy, files: PlanFiles | None
) -> tuple[PlanVariable, ...]:
    variables: list[PlanVariable] = []
    for name, variable in analysis.training.variables.items():
        role = analysis.roles.variables[name]
        parameter = analysis.followers[name] or role.parameter
        gradient = analysis.training.gradients.get(name)
        own = strategy.parameters.get(parameter or name)
        has_method = analysis.followers[name] is not None or name in strategy.parameters
        variables.append(
            PlanVariable(
                name,
                variable.dtype.name,
                variable.shape,
                Stored("", name) if files is None else files.save_initial(name, variable.initial),
                role.role,
                parameter if parameter != name else None,
                gradient is not None and gradient.is_sparse,
                own.method if own is not None and has_method else "replicated",
            )
        )
    return tuple(variables)


def _describe_outputs(lowered: LoweredGraph, program: Program) -> tuple[Output, ...]:
    outputs: list[Output] = []
    for name, value, layout in lowered.outputs:
        value = program.renamed.get(value, value)
        placement = layout.along(REPLICAS)
        if isinstance(placement, Split):
            outputs.append(Output(name, value, "split", placement.axis, layout.site))
        elif isinstance(placement, PerReplica):
            outputs.append(Output(name, value, "per_replica", site=layout.site))
        else:
            outputs.append(Output(name, value, "whole", site=layout.site))
    return tuple(outputs)
