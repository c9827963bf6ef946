"""Write the user's graph back with ONNX's own multi-device metadata (IR version 11).

One device configuration names the cluster's devices in rank order. A node's sharding spec says how
the tensors that it makes lie on them: split along an axis (or along an inner factor of one), or whole
on every device, which is what the absence of a spec means. Under the per-replica reading every
device has tensors of its own, so nothing before the gradients is sharded. Rows that servers own are
sharded over the hosts' servers.
"""

from collections.abc import Mapping, Sequence

import onnx

from partc.cost.cluster.cluster import Cluster, groups_of, ranks_of
from partc.passes.layouts.layouts import REPLICAS, Layout, Owned, Split

CONFIGURATION = "partc"
ANNOTATED_IR_VERSION = 11


def annotate(
    model: onnx.ModelProto,
    layouts: Mapping[str, Layout],
    shapes: Mapping[str, tuple[int, ...]],
    cluster: Cluster,
) -> onnx.ModelProto:
    """Return a copy of `model` whose nodes say where their outputs are."""
    annotated = onnx.ModelProto()
    annotated.CopyFrom(model)
    annotated.ir_version = max(annotated.ir_version, ANNOTATED_IR_VERSION)
    ranks = ranks_of(cluster)
    devices = [rank.device if rank.replica is not None else f"{rank.host}/server" for rank in ranks]
    configuration = annotated.configuration.add(name=CONFIGURATION, num_devices=len(devices))
    configuration.device.extend(devices)
    workers = [rank.rank for rank in ranks if rank.replica is not None]
    servers = list(groups_of(cluster)["servers"][0])
    for node in annotated.graph.node:
        specs = [
            _spec(name, layouts[name], shapes[name], workers, servers)
            for name in node.output
            if name in layouts and isinstance(layouts[name].along(REPLICAS), Split | Owned)
        ]
        if specs:
            place = node.device_configurations.add(configuration_id=CONFIGURATION)
            place.sharding_spec.extend(specs)
    return annotated


def _spec(
    tensor: str, layout: Layout, shape: tuple[int, ...], workers: Sequence[int], servers: Sequence[int]
) -> onnx.ShardingSpecProto:
    placement = layout.along(REPLICAS)
    devices = servers if isinstance(placement, Owned) else workers
    axis, outer = (placement.axis, placement.outer) if isinstance(placement, Split) else (0, 1)
    spec = onnx.ShardingSpecProto(tensor_name=tensor, device=devices)
    sharded = spec.sharded_dim.add(axis=axis)
    if outer > 1:
        sharded.simple_sharding.add(dim_value=outer, num_shards=1)
    size = shape[axis] // outer
    if size:
        sharded.simple_sharding.add(dim_value=size, num_shards=len(devices))
    else:  # as many slices as the data has
        sharded.simple_sharding.add(num_shards=len(devices))
    return spec
