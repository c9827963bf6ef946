"""Parallax's interface: what a training script for one device changes to train on a cluster.

    ds = partc.shard(ds)                                             each replica reads batches of its own
    runner = partc.get_runner(train, resource_info, config, data=ds)
    runner.run("loss")                                               one step of all replicas

Sources: parallax.txt, table 2 and figures 4 and 5; parallax-manual.txt. docs/parallax-api.md maps every call.
"""

import atexit
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import onnx

from partc.compiler.api import compile
from partc.compiler.graph_runner import (
    AsynchronousTraining,
    GraphRunner,
    SteppedTraining,
    Training,
    TrainingOptions,
)
from partc.compiler.importing.shard_inputs import create_num_shards_and_shard_id
from partc.compiler.options import GraphOptions
from partc.compiler.parallax_config import TRACE_FILE, ParallaxConfig
from partc.cost.cluster.cluster import Cluster, read_any_cluster
from partc.runtime.callers_code import callers_code
from partc.runtime.check_arguments import public
from partc.runtime.data.batches import Batch
from partc.runtime.data.feeds import find_function
from partc.runtime.data.sharded import ReadShard, ShardedData, is_read_by_shard
from partc.runtime.errors import BadData, BadUsage
from partc.runtime.jobs.job_folder import held_folder
from partc.runtime.log import configure_log

Graph = str | Path | onnx.ModelProto
ResourceInfo = str | Path | Cluster
RunFunction = Callable[[Training, int, int, int], None]  # (training, num_workers, worker_id, replicas)


@public
def shard(data: Iterable[Batch] | ReadShard | str) -> ShardedData:
    """Split a data set so that every replica reads a part of its own.

    An iterable of one replica's batches (input -> array): replica i of n reads elements i, i + n, ...
    A function of (num_shards, shard_id): it returns the batches of a shard. As "MODULE:FUNC", every rank
    calls it on its own host; otherwise this process reads for all. Raises BadData.
    """
    if isinstance(data, ShardedData):
        raise BadData(
            "data that is sharded already", at="shard", fix="shard once: replicas share out what it gives"
        )
    if not isinstance(data, str):
        return ShardedData(data)
    function = find_function(data)
    if not is_read_by_shard(function):
        raise BadData(
            f"{data} does not take a shard's place",
            at="shard",
            fix="let it be a function of (num_shards, shard_id) that returns the batches of one shard",
        )
    return ShardedData(function, data)


# The manual writes shard.shard(ds), and shard.create_num_shards_and_shard_id().
vars(shard).update(shard=shard, create_num_shards_and_shard_id=create_num_shards_and_shard_id)


@public
def get_runner(
    graph: Graph,
    resource_info: ResourceInfo,
    config: ParallaxConfig | None = None,
    *,
    data: ShardedData | None = None,
) -> GraphRunner:
    """Spread a training graph for one device over a cluster, start it, and return its runner.

    `resource_info`: a resource file (`host: gpu ids`), a cluster.json, or a Cluster. `data`: what `shard`
    returned, where `run` is not fed. The result also unpacks, as Parallax's does: training, num_workers,
    worker_id, num_replicas_per_worker. Raises PartcError.
    """
    configure_log()
    settings = config or ParallaxConfig()
    cluster = resource_info if isinstance(resource_info, Cluster) else read_any_cluster(Path(resource_info))
    machines = settings.machines(cluster)
    plan = compile(
        graph,
        machines,
        _folder_of(settings, machines),
        strategy=settings.strategy,
        sizes=settings.sizes or {},
        options=settings.options or GraphOptions(),
        partitions=settings.partitions(),
        without=settings.communication.ps.without(),
        asynchronous=not settings.sync,
        aggregation=settings.aggregation,
        replica_outputs=settings.sync,
        force=settings.force,
    )
    job = TrainingOptions(
        timeout_s=settings.timeout_s,
        seed=settings.session.seed,
        stop_when_diverged=settings.session.stop_when_diverged,
        checkpoints=settings.checkpoints.checkpoints(),
        traced_steps=settings.profile.traced_steps(),
        trace=None
        if settings.profile.profile_dir is None
        else Path(settings.profile.profile_dir).absolute() / TRACE_FILE,
        traced_replica=settings.profile.profile_worker,
        redirect=None if settings.redirect_path is None else Path(settings.redirect_path).absolute(),
        is_plan_temporary=settings.out is None,
    )
    start = SteppedTraining if settings.sync else AsynchronousTraining
    replicas = plan.plan.replicas if settings.sync else len(plan.plan.asynchronous)
    return GraphRunner(start(plan, data, job), 1, 0, replicas)


@public
def parallel_run(
    graph: Graph,
    run: RunFunction,
    resource_info: ResourceInfo,
    config: ParallaxConfig | None = None,
    *,
    data: ShardedData | None = None,
) -> None:
    """Start a training and hand it to `run`; end it when `run` returns. Raises PartcError."""
    with get_runner(graph, resource_info, config, data=data) as runner, callers_code():
        run(*runner)


def _folder_of(config: ParallaxConfig, machines: Cluster) -> Path:
    if config.out is not None:
        return Path(config.out).absolute()  # the caller may go elsewhere
    if far := [host for host in machines.hosts if host.address not in ("localhost", "127.0.0.1")]:
        raise BadUsage(
            f"no folder for the plan, and host {far[0].name!r} is another machine",
            at="config.out",
            fix="name a folder that all hosts see under the same path",
        )
    at_the_end = ExitStack()
    atexit.register(at_the_end.close)
    return at_the_end.enter_context(held_folder(Path(tempfile.gettempdir()), "partc-run-")) / "plan"
