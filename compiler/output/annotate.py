"""Write the user's graph back with ONNX's own multi-device metadata (IR version 11).

One device configuration names the cluster's devices in rank order. A node's sharding spec says how
the tensors that it makes lie on them: split along an axis (or along an inner factor of one), or whole
on every device, which is what the absence of a spec means. Under the per-replica reading every
device has tensors of its own, so nothing before the gradients is sharded. Rows that servers own are
sharded over the hosts' servers. In a pipeline a node says its stage, and shards are on the stage's workers.
Where operators have devices of their own, what is whole on these says so by a spec that divides nothing.

A node's metadata names its segments, the ranks that run them, and their devices; devices are numbered as
ranks are. The model's documentation says so, for viewers that show no device configurations.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod

import onnx

from partc.compiler.output.title_segments import KEY, SegmentTitle
from partc.compiler.planning.describe_ranks import ranks_at_sites
from partc.compiler.report.units import first_words
from partc.cost.cluster.cluster import Cluster, ranks_of
from partc.passes.layouts.layouts import Layout, Replicate
from partc.passes.layouts.meshes import Mesh, Meshes

CONFIGURATION = "partc"
DOC = "Annotated by partc: "  # what its sentence in the model's documentation begins with
MOST_DEVICES = 8  # named of a node or of the model
ANNOTATED_IR_VERSION = 11


def annotate(
    model: onnx.ModelProto,
    layouts: Mapping[str, Layout],
    shapes: Mapping[str, tuple[int, ...]],
    cluster: Cluster,
    meshes: Meshes,
    segments: Mapping[str, Sequence[SegmentTitle]] | None = None,
) -> onnx.ModelProto:
    """Return a copy of `model` whose nodes say where they run and where their outputs are.

    `segments`: node -> those that it is in. What the model said of devices before is not in the copy.
    """
    annotated = onnx.ModelProto()
    annotated.CopyFrom(model)
    del annotated.configuration[:]
    annotated.ir_version = max(annotated.ir_version, ANNOTATED_IR_VERSION)
    ranks = ranks_of(cluster)
    devices = [rank.device if rank.replica is not None else f"{rank.host}/server" for rank in ranks]
    configuration = annotated.configuration.add(name=CONFIGURATION, num_devices=len(devices))
    configuration.device.extend(devices)
    annotated.doc_string = _documentation(model.doc_string, devices)
    at = ranks_at_sites(cluster, meshes)
    stages = {mesh.name: number for number, mesh in enumerate(meshes.each)} if is_pipeline(meshes) else {}
    workers = tuple(rank.rank for rank in ranks if rank.replica is not None)
    apart = {site for site, members in at.items() if site != "server" and sorted(members) != sorted(workers)}
    holders = cache(lambda layout: _holders(layout, at[layout.site], meshes.of(layout.site)))
    for node in annotated.graph.node:
        del node.device_configurations[:]
        placed = [name for name in node.output if name in layouts]
        specs: list[onnx.ShardingSpecProto] = []
        for name in placed:
            site = layouts[name].site
            own = list(_specs(name, layouts[name], shapes[name], at[site], meshes, holders))
            whole = [onnx.ShardingSpecProto(tensor_name=name, device=at[site])] if site in apart else []
            specs += own or whole
        own_stages = [stages[layouts[name].site] for name in placed if layouts[name].site in stages]
        if specs or own_stages:
            place = node.device_configurations.add(configuration_id=CONFIGURATION)
            place.sharding_spec.extend(specs)
        if own_stages:
            place.pipeline_stage = own_stages[0]
        titles = (segments or {}).get(node.name, ())
        sites = dict.fromkeys(title.metadata["mesh"] for title in titles)
        _tell_segments(node, titles, [devices[rank] for site in sites for rank in at[site]])
    return annotated


def _documentation(before: str, devices: Sequence[str]) -> str:
    """Return a model's documentation with a sentence on what partc says in it, once."""
    named = first_words([f"{rank} {device}" for rank, device in enumerate(devices)], MOST_DEVICES)
    own = f"{DOC}every node's metadata has its segments, ranks and devices. Ranks: {named}."
    return "\n\n".join(filter(None, (before.partition(DOC)[0].rstrip(), own)))


def is_pipeline(meshes: Meshes) -> bool:
    """Tell whether the meshes are stages that follow each other, and no operator's own."""
    return len(meshes.each) > 1 and all(mesh.name == f"stage{n}" for n, mesh in enumerate(meshes.each))


def _tell_segments(node: onnx.NodeProto, titles: Sequence[SegmentTitle], devices: Sequence[str]) -> None:
    """Say in the node's metadata in which segments it is, and on which ranks and devices they run."""
    other_entries = [entry for entry in node.metadata_props if not entry.key.startswith(KEY)]
    del node.metadata_props[:]
    node.metadata_props.extend(other_entries)
    if titles:
        node.metadata_props.add(key=f"{KEY}segment", value=",".join(title.name for title in titles))
        ranks = dict.fromkeys(title.metadata["ranks"] for title in titles)
        node.metadata_props.add(key=f"{KEY}ranks", value=",".join(ranks))
        node.metadata_props.add(key=f"{KEY}devices", value=first_words(devices, MOST_DEVICES))


def _specs(
    tensor: str,
    layout: Layout,
    shape: tuple[int, ...],
    ranks: Sequence[int],
    meshes: Meshes,
    holders: Callable[[Layout], list[list[int]]],
) -> Iterator[onnx.ShardingSpecProto]:
    """Yield how a tensor is sharded over ranks, nothing for one that each of them has whole."""
    mesh = meshes.of(layout.site)
    if mesh.microbatch_axis is not None:
        layout = layout.with_along(mesh.microbatch_axis, Replicate())
    if layout.rows_of:
        spec = onnx.ShardingSpecProto(tensor_name=tensor, device=ranks)
        _shard(spec.sharded_dim.add(axis=0), shape[0], [(1, len(ranks))])
        yield spec
    elif layout.splits():
        spec = onnx.ShardingSpecProto(tensor_name=tensor)
        _add_devices(spec, holders(layout))
        for axis in sorted({split.axis for _, split in layout.splits()}):
            here = [split for _, split in layout.splits() if split.axis == axis]
            behind = {split.outer * split.uneven for split in here if split.uneven} - {shape[axis]}
            places = sorted({split.outer for split in here} | behind)
            cuts = [(outer, _parts(layout, axis, outer, mesh)) for outer in places]
            _shard(spec.sharded_dim.add(axis=axis), shape[axis], cuts)
        yield spec


def _shard(sharded: onnx.ShardedDimProto, length: int, cuts: Sequence[tuple[int, int]]) -> None:
    """Say into how many parts an axis is divided behind each number of blocks, outermost first."""
    before = 1
    for (outer, parts), (end, _) in zip(cuts, [*cuts[1:], (length, 1)], strict=True):
        if outer > before:
            sharded.simple_sharding.add(dim_value=outer // before, num_shards=1)
        if size := end // outer:
            sharded.simple_sharding.add(dim_value=size, num_shards=parts)
        else:  # as many slices as the data has
            sharded.simple_sharding.add(num_shards=parts)
        before = end


def _parts(layout: Layout, axis: int, outer: int, mesh: Mesh) -> int:
    here = (number for number, split in layout.splits() if (split.axis, split.outer) == (axis, outer))
    return prod(map(mesh.size, here))


def _holders(layout: Layout, workers: Sequence[int], mesh: Mesh) -> list[list[int]]:
    """Return who holds each shard: in the order of the tensor's axes, and of an axis' parts."""
    axes = sorted(layout.splits(), key=lambda pair: (pair[1].axis, pair[1].outer, pair[0]))
    shards: dict[tuple[int, ...], list[int]] = {}
    for position, rank in enumerate(workers):
        place = mesh.coordinates(position)
        shards.setdefault(tuple(place[axis] for axis, _ in axes), []).append(rank)
    return [shards[shard] for shard in sorted(shards)]


def _add_devices(spec: onnx.ShardingSpecProto, holders: Sequence[Sequence[int]]) -> None:
    """List the devices of all shards; groups of several, which hold copies, are numbered behind them."""
    groups = 1 + max(rank for ranks in holders for rank in ranks)
    for number, ranks in enumerate(holders):
        if len(ranks) == 1:
            spec.device.append(ranks[0])
            continue
        spec.device.append(groups + number)
        spec.index_to_device_group_map.add(key=groups + number, value=ranks)
