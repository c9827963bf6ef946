"""Write a named strategy out: an ordinary strategy, as a file could say it."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from partc.cost.named_strategy import NamedStrategy
from partc.cost.strategy import MESH_STRATEGY_FORMAT, AxisSplit, Batch, OpConfig, Strategy
from partc.passes.analysis import Analysis
from partc.passes.layouts.configuration import Wish
from partc.passes.layouts.layouts import REPLICAS, Layout
from partc.passes.layouts.meshes import Mesh
from partc.passes.search.named.divide_products import divide_products
from partc.passes.search.named.shard_variables import shard_variables
from partc.passes.search.named.split_dense import split_dense
from partc.passes.search.named.split_space import split_space
from partc.passes.search.named.tensor_parallel import split_weights
from partc.passes.search.operators.find_groups import spell_dimension
from partc.passes.search.stages.batch_wide import is_batch_wide
from partc.passes.search.stages.cut_layers import cut_layers
from partc.passes.search.stages.cut_stages import cut_stages
from partc.passes.search.stages.line_work import NodeSeconds
from partc.passes.search.stages.price_cuts import PipelineTraffic
from partc.runtime.errors import BadUsage

# With m micro-batches and s stages, (s - 1) of (m + s - 1) turns are idle: a fifth at four a stage
# (Huang et al. 2019, GPipe, section 2.3, whose overhead is negligible from there on).
MICROBATCHES_PER_STAGE = 4

# (mesh axes of a stage, micro-batches, whether the graph's batch is one replica's) -> what messages take
TrafficOf = Callable[[Mapping[str, int], int, bool], PipelineTraffic]


def name_strategy(
    analysis: Analysis,
    named: NamedStrategy,
    hosts: Sequence[str],
    batch: Batch,
    seconds: NodeSeconds,
    traffic_of: TrafficOf | None = None,
    devices: tuple[str, ...] = (),
) -> Strategy:
    """Return what a name means for a step. Raises BadUsage where it means nothing there.

    `hosts`: of every worker that it is for; `seconds`: what a node takes on one; `traffic_of`: what messages
    of a pipeline take, None if nothing; `devices`: the workers that it is for, empty: all.
    """
    if named.divides_layers:
        return _layerwise(analysis, named, hosts, batch, seconds)
    if named.splits_dense:
        return _one_weird_trick(analysis, named, len(hosts), batch, devices)
    sizes = named.mesh(len(hosts))
    ops = divide_whole_products(analysis, sizes, seconds)
    if (parts := sizes.get("spatial", 1)) > 1:
        ops += _split_height(analysis, named, parts)
    microbatches = named.microbatches or default_microbatches(analysis, named.stages, analysis.replicas)
    begin: dict[str, int] = {}
    if named.stages > 1:
        traffic = None if traffic_of is None else traffic_of(sizes, microbatches, batch != "global")
        begin = cut_stages(analysis, named.stages, seconds, traffic)
    return Strategy(
        MESH_STRATEGY_FORMAT,
        batch,
        {},
        mesh=sizes,
        devices=devices,
        variables=share_variables(analysis, sizes, named.shards_variables),
        ops=_with_stages(ops, begin),
        stages=named.stages,
        microbatches=microbatches,
    )


def share_variables(
    analysis: Analysis, sizes: Mapping[str, int], by_replicas: bool
) -> dict[str, dict[str, AxisSplit]]:
    """Return variable -> mesh axis -> where it is split. `by_replicas`: among replicas too, as by fsdp."""
    mesh = Mesh("worker", tuple(sizes.items()))
    homes: dict[str, Layout] = {}
    for axis, (name, size) in enumerate(mesh.axes):
        if name == "tensor" and size > 1:
            for variable, split in split_weights(analysis, mesh, axis).items():
                homes[variable] = homes.get(variable, Layout("worker")).with_along(axis, split)
    if by_replicas:
        for variable, split in shard_variables(analysis, mesh, homes).items():
            homes[variable] = homes.get(variable, Layout("worker")).with_along(REPLICAS, split)
    return {
        variable: {mesh.axes[axis][0]: AxisSplit(split.axis, split.outer) for axis, split in home.splits()}
        for variable, home in homes.items()
    }


def divide_whole_products(
    analysis: Analysis, sizes: Mapping[str, int], seconds: NodeSeconds
) -> tuple[OpConfig, ...]:
    """Return what is asked of products that weights' splits along `tensor` leave whole on every rank."""
    mesh = Mesh("worker", tuple(sizes.items()))
    return tuple(
        OpConfig(node, {"batch": "data", spell_dimension(split): name})
        for axis, (name, size) in enumerate(mesh.axes)
        if name == "tensor" and size > 1
        for weights in (split_weights(analysis, mesh, axis),)
        for node, split in divide_products(analysis, mesh, axis, weights, seconds).items()
    )


def _with_stages(ops: Sequence[OpConfig], begin: Mapping[str, int]) -> tuple[OpConfig, ...]:
    """Let ops begin stages, in an entry of their own where they are asked for nothing else."""
    named = {config.op for config in ops}
    return (
        *(msgspec.structs.replace(config, stage=begin.get(config.op)) for config in ops),
        *(OpConfig(node, stage=stage) for node, stage in begin.items() if node not in named),
    )


def _layerwise(
    analysis: Analysis, named: NamedStrategy, hosts: Sequence[str], batch: Batch, seconds: NodeSeconds
) -> Strategy:
    """Give each layer a device of every host."""
    at_host: dict[str, list[str]] = {}
    for worker, host in zip(analysis.workers, hosts, strict=True):
        at_host.setdefault(host, []).append(worker)
    counts = [len(devices) for devices in at_host.values()]
    if len(set(counts)) > 1:
        raise BadUsage(
            f"hosts of {', '.join(map(str, counts))} devices, where each host is to be a replica",
            at=f"--strategy {named.text}",
            fix="use a cluster whose hosts have equally many devices, or "
            f"--strategy data=1,pipeline={len(analysis.workers)}",
        )
    meshes = list(zip(*at_host.values(), strict=True))
    shares, microbatches = len(counts) if batch == "global" else 1, named.microbatches or 1
    layers = cut_layers(analysis, len(meshes), seconds, shares, microbatches)
    return Strategy(
        MESH_STRATEGY_FORMAT,
        batch,
        {},
        ops=tuple(OpConfig(node, devices=meshes[number]) for node, number in layers.items()),
        microbatches=microbatches,
    )


def default_microbatches(analysis: Analysis, stages: int, replicas: int) -> int:
    """Return into how many parts a replica's batch is best divided: up to four a stage, all equal.

    One where stages wait for the whole batch anyway.
    """
    if stages == 1 or is_batch_wide(analysis):
        return 1
    counts = microbatch_counts(analysis, 1 if analysis.per_replica else replicas)
    return max(count for count in counts if count <= MICROBATCHES_PER_STAGE * stages)


def microbatch_counts(analysis: Analysis, shares: int) -> tuple[int, ...]:
    """Return into how many equal parts a replica's batch may pass. `shares`: replicas of the graph's own."""
    fed = analysis.training.data_inputs.values()
    sizes = [analysis.facts.shape(e.name)[e.sample_axis] // shares for e in fed if e.sample_axis is not None]
    return tuple(n for n in range(1, min(sizes, default=1) + 1) if all(size % n == 0 for size in sizes)) or (
        1,
    )


def _split_height(analysis: Analysis, named: NamedStrategy, parts: int) -> tuple[OpConfig, ...]:
    wishes = split_space(analysis, parts)
    if not _has_split(wishes):
        fewer = next(
            (n for n in range(parts - 1, 1, -1) if parts % n == 0 and _has_split(split_space(analysis, n))), 1
        )
        others = named.sizes.get("tensor", 1) * (parts // fewer)
        raise BadUsage(
            f"no windows of a convolution or pooling make as many rows as there are workers, {parts}",
            at=f"--strategy {named.text}",
            fix=f"use --strategy {named.with_sizes(spatial=fewer, tensor=others)}",
        )
    entries: list[OpConfig] = []
    for node, wish in wishes.items():
        split: dict[str, int | str] = {"batch": "data"}
        if wish.split is not None:
            split[spell_dimension(wish.split)] = "spatial"
        entries.append(OpConfig(node, split))
    return tuple(entries)


def _has_split(wishes: Mapping[str, Wish]) -> bool:
    return any(wish.split for wish in wishes.values())


def _one_weird_trick(
    analysis: Analysis, named: NamedStrategy, workers: int, batch: Batch, devices: tuple[str, ...]
) -> Strategy:
    sizes = named.mesh(workers)
    at = f"--strategy {named.text}"
    samples, others = analysis.fewest_samples(), f"or use --strategy tensor={workers}"
    if samples is not None and samples < workers:
        raise BadUsage(
            f"a batch of {samples}, which {workers} workers are to divide where layers are not dense",
            at=at,
            fix=f"use a batch of {workers} or more, {others}",
        )
    if batch != "global":
        raise BadUsage(
            "dense layers take the samples of all workers together: replicas have no batches of their own",
            at=f"{at} with a {batch} batch",
            fix=f"leave --batch out, {others}",
        )
    split = split_dense(analysis, Mesh("worker", tuple(sizes.items())))
    if not split.variables and workers > 1:
        raise BadUsage(
            f"no dense layer has columns for {workers} workers",
            at=at,
            fix=f"use --strategy data={workers}, or tensor={workers}",
        )
    variables = {name: {"data": AxisSplit(s.axis, s.outer)} for name, s in split.variables.items()}
    ops = tuple(
        OpConfig(node, {} if wish.split is None else {spell_dimension(wish.split, wish.operand): "data"})
        for node, wish in split.wishes.items()
    )
    return Strategy(
        MESH_STRATEGY_FORMAT, batch, {}, mesh=sizes, devices=devices, variables=variables, ops=ops
    )
