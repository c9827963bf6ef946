"""Read ONNX's own multi-device metadata (IR version 11) as a strategy: what a user's file pins.

    configuration      its devices are the cluster's, by name, or by number where it names none
    pipeline_stage     the stage of a node, of as many as there are: workers in their order, as many for each
    sharding_spec      of a node's first output: along which axes it is divided, and who has each part. A node
                       with a spec runs on those devices, and others divide the samples among all workers
                       of the next value of a variable, along axis 0 of the hosts' servers: their rows
                       of the next value of a variable, over all workers: its parts, kept by them

A tensor that is whole on several devices is taken for a sum over the samples that these divide.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx

from partc.cost.cluster.cluster import Cluster, groups_of, ranks_of
from partc.cost.strategy import (
    MESH_STRATEGY_FORMAT,
    STRATEGY_FORMAT,
    AxisSplit,
    Batch,
    OpConfig,
    Strategy,
    Synchronisation,
)
from partc.passes.graph.facts import Facts
from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.layouts import Split
from partc.passes.roles.find_roles import find_roles
from partc.passes.roles.find_sample_axes import find_sample_splits
from partc.runtime.errors import BadModel, some_of

BATCH, DATA = "batch", "data"
_STRATEGY = (
    "take the annotations out, or say it in a strategy.json (docs/meshes.md) and give that by --strategy"
)


@dataclass(frozen=True, slots=True)
class _Pin:
    """What a node's annotation says: its stage, and how its first output lies.

    `parts`: (split, parts) of the axes in order; `devices`: ranks, by shard in the order of these parts.
    """

    node: str
    tensor: str
    stage: int | None
    parts: tuple[tuple[Split, int], ...] = ()
    devices: tuple[int, ...] = ()


def has_annotations(training: TrainingGraph) -> bool:
    """Tell whether the user's file says where its nodes run."""
    return any(node.device_configurations for node in _source(training).graph.node)


def strategy_of_annotations(
    training: TrainingGraph, sizes: Mapping[str, int], cluster: Cluster, batch: Batch | None = None
) -> Strategy | None:
    """Return the strategy that the user's file pins, None if it says nothing. Raises BadModel.

    A tensor of the file is the whole tensor, so that its samples are those of one batch for all. `batch`: as
    asked for, where nothing is said of samples; None: each replica's.
    """
    model = _source(training)
    if not any(node.device_configurations for node in model.graph.node):
        return None
    configuration, ranks = _choose_configuration(model, cluster)
    facts = infer_facts(training, sizes)
    node_of = {node.name: node for node in training.graph.nodes}
    pins = [
        pin
        for node in model.graph.node
        if node.name in node_of
        for place in node.device_configurations
        if place.configuration_id == configuration
        for pin in _pins(node, place, ranks, facts)
    ]
    return _Pinned(training, facts, cluster, pins).strategy(batch or "per-replica")


def _source(training: TrainingGraph) -> onnx.ModelProto:
    model = onnx.ModelProto()
    model.ParseFromString(training.source)
    return model


def _choose_configuration(model: onnx.ModelProto, cluster: Cluster) -> tuple[str, list[int]]:
    """Return the first configuration whose devices the cluster has, and the rank of each. Raises BadModel."""
    placed = ranks_of(cluster)
    rank_of = {rank.device: rank.rank for rank in placed}
    servers = zip((host.name for host in cluster.hosts), groups_of(cluster)["servers"][0], strict=False)
    rank_of |= {f"{host}/server": rank for host, rank in servers}
    for configuration in model.configuration:
        names = list(configuration.device)
        if names and all(name in rank_of for name in names):
            return configuration.name, [rank_of[name] for name in names]
        if not names and configuration.num_devices in (
            len(placed),
            sum(r.replica is not None for r in placed),
        ):
            return configuration.name, list(range(configuration.num_devices))
    known = [f"{c.name!r} of {c.num_devices} devices" for c in model.configuration]
    raise BadModel(
        f"annotated for other devices: {', '.join(known) or 'a configuration that it does not have'}",
        at="configuration",
        fix=f"name devices among {some_of(sorted(rank_of))}, or say by --strategy what runs where",
    )


def _pins(
    node: onnx.NodeProto, place: onnx.NodeDeviceConfigurationProto, ranks: Sequence[int], facts: Facts
) -> Iterator[_Pin]:
    stage = place.pipeline_stage if place.HasField("pipeline_stage") else None
    spec = next((s for s in place.sharding_spec if s.tensor_name == node.output[0]), None)
    if spec is None:
        if stage is not None:
            yield _Pin(node.name, node.output[0], stage)
        return
    at = f"node {node.name!r}: sharding of {spec.tensor_name!r}"
    parts = tuple(_parts(spec, len(facts.shape(spec.tensor_name)), at))
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    shards = [groups.get(device, [device]) for device in spec.device]
    if any(not 0 <= device < len(ranks) for shard in shards for device in shard):
        raise BadModel("a device that the configuration does not have", at=at, fix="number them from 0")
    if parts and len(shards) != prod(number for _, number in parts):
        what = f"{len(shards)} devices for {prod(number for _, number in parts)} shards"
        raise BadModel(what, at=at, fix="name a device, or a group of them, for each shard")
    if parts and any(len(shard) > 1 for shard in shards):
        raise BadModel("copies of shards, on groups of devices", at=at, fix=_STRATEGY)
    devices = tuple(ranks[device] for shard in shards for device in shard)
    yield _Pin(node.name, spec.tensor_name, stage, parts, devices)


def _parts(spec: onnx.ShardingSpecProto, rank: int, at: str) -> Iterator[tuple[Split, int]]:
    """Yield what is divided, and into how many parts."""
    for dim in sorted(spec.sharded_dim, key=lambda dim: dim.axis % max(1, rank)):
        if not -rank <= dim.axis < rank:
            raise BadModel(f"axis {dim.axis} of {rank}", at=at, fix=f"give one from {-rank} to {rank - 1}")
        outer = 1
        for factor in dim.simple_sharding:
            if factor.num_shards > 1:
                yield Split(dim.axis % rank, outer), factor.num_shards
            outer *= max(1, factor.dim_value)


class _Pinned:
    """Puts the pins of all nodes together."""

    def __init__(self, training: TrainingGraph, facts: Facts, cluster: Cluster, pins: Sequence[_Pin]) -> None:
        self._samples = find_sample_splits(training, facts)
        self._names = {rank.rank: rank.device for rank in ranks_of(cluster)}
        self._workers = tuple(rank.rank for rank in ranks_of(cluster) if rank.replica is not None)
        self._servers = groups_of(cluster)["servers"][0]
        next_of = {variable.next: name for name, variable in training.variables.items()}
        main = find_roles(training).main
        self._ops = [pin for pin in pins if pin.node in main]
        self._variables = {next_of[p.tensor]: p for p in pins if p.node not in main and p.tensor in next_of}
        self._gradients = training.gradients

    def strategy(self, otherwise: Batch) -> Strategy:
        """Return what is pinned. Raises BadModel where a strategy cannot say it.

        `otherwise`: what the batch is if nothing is said of samples.
        """
        servers = {n: p for n, p in self._variables.items() if self._is_of_servers(p)}
        parted = {n: p for n, p in self._variables.items() if p.parts and n not in servers}
        parameters = {n: Synchronisation("servers") for n in servers if n in self._gradients}
        if any(pin.stage is not None for pin in self._ops):
            self._refuse({**servers, **parted}.values(), "beside stages")
            return self._stages()
        own = [pin for pin in self._ops if pin.devices and not self._is_data_parallel(pin)]
        if own:
            self._refuse({**servers, **parted}.values(), "beside operators' own devices")
            return Strategy(MESH_STRATEGY_FORMAT, "global", {}, ops=tuple(self._entries(own)))
        if parted:
            self._refuse(servers.values(), "beside variables that workers keep in parts")
            homes = {name: {DATA: self._home(pin)} for name, pin in parted.items()}
            mesh = {DATA: len(self._workers)}
            return Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh=mesh, variables=homes)
        return Strategy(STRATEGY_FORMAT, "global" if self._ops else otherwise, parameters)

    def _is_of_servers(self, pin: _Pin) -> bool:
        is_by_rows = len(pin.parts) == 1 and pin.parts[0][0] == Split(0)
        return is_by_rows and pin.devices == self._servers and pin.devices != self._workers

    def _is_data_parallel(self, pin: _Pin) -> bool:
        """Tell whether all workers divide the samples, or have what is a sum over them."""
        splits = [split for split, _ in pin.parts]
        return pin.devices == self._workers and splits in ([], [self._samples.get(pin.tensor)])

    def _home(self, pin: _Pin) -> AxisSplit:
        if len(pin.parts) > 1 or pin.devices != self._workers:
            self._refuse([pin], "not over all workers in their order")
        split = pin.parts[0][0]
        return AxisSplit(split.axis, split.outer)

    def _stages(self) -> Strategy:
        """Return a pipeline. Raises BadModel where its stages are not the workers in order."""
        stages = 1 + max(pin.stage or 0 for pin in self._ops)
        size, rest = divmod(len(self._workers), stages)
        entries: list[OpConfig] = []
        for pin in self._ops:
            if pin.stage is None:
                continue
            own = self._workers[pin.stage * size : (pin.stage + 1) * size]
            is_here = pin.devices in ((), own) and not rest
            if not is_here or [split for split, _ in pin.parts] not in ([], [self._samples.get(pin.tensor)]):
                self._refuse([pin], f"in a pipeline of {stages} stages on {len(self._workers)} workers")
            entries.append(OpConfig(pin.node, stage=pin.stage))
        return Strategy(
            MESH_STRATEGY_FORMAT, "global", {}, mesh={DATA: size}, ops=tuple(entries), stages=stages
        )

    def _entries(self, own: Sequence[_Pin]) -> Iterator[OpConfig]:
        """Yield that all workers divide the samples of every op, and then what is said of some."""
        yield OpConfig("*", devices=tuple(self._names[rank] for rank in self._workers))
        for pin in own:
            samples = self._samples.get(pin.tensor)
            # Devices are told in the order of the tensor's axes; a mesh has the samples along its first.
            by_axis = np.array(pin.devices).reshape([number for _, number in pin.parts] or [-1])
            first = [n for n, (split, _) in enumerate(pin.parts) if split == samples]
            order = [*first, *(n for n in range(len(pin.parts)) if n not in first)]
            ranks = (by_axis.transpose(order) if pin.parts else by_axis).reshape(-1).tolist()
            split: dict[str, int | str] = {
                _spell(s, s == samples): number for s, number in (pin.parts[n] for n in order)
            }
            devices = tuple(self._names[rank] for rank in ranks)
            yield OpConfig(pin.node, split if pin.parts or len(ranks) == 1 else None, devices=devices)

    def _refuse(self, pins: Iterable[_Pin], where: str) -> None:
        for pin in pins:
            raise BadModel(
                f"{pin.tensor!r} is divided {where}, which annotations cannot ask for",
                at=f"node {pin.node!r}: device_configurations",
                fix=_STRATEGY,
            )


def _spell(split: Split, is_samples: bool) -> str:
    """Return what a strategy calls a dimension."""
    if is_samples:
        return BATCH
    return f"out:{split.axis}" + (f"/{split.outer}" if split.outer > 1 else "")
