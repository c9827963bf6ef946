"""What Parallax's configuration says, in partc's options.

    communication.ps    local_aggregation, boundaries   ->  mechanisms that compiling leaves out
    communication.mpi   mpirun_options                  ->  what mpiexec is told besides
    checkpoints         ckpt_dir, save_ckpt_*           ->  checkpoints, from which the next training goes on
    profile             profile_dir, profile_*          ->  a trace of those steps
    session             threads, seed                   ->  the devices' threads, the job's seed

What cannot mean anything here is refused where the record is made: BadUsage.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from partc.compiler.options import GraphOptions, Partitioner
from partc.cost.cluster.cluster import Cluster
from partc.cost.strategy import Mechanism
from partc.runtime.check_arguments import check_fields, public_record
from partc.runtime.errors import BadUsage
from partc.runtime.execution.recorder import TracedSteps
from partc.runtime.jobs.job import Checkpoints, check_timeout
from partc.runtime.plan.program import Aggregation

TRACE_FILE = "trace.json"
PARALLAX_ARCHITECTURES = {"HYBRID": "hybrid", "PS": "ps", "MPI": "allreduce", "AR": "allreduce"}


@public_record
@dataclass(frozen=True, slots=True)
class PSConfig:
    """How workers and servers share the work of what servers own (parallax.txt, section 5.3.2).

    local_aggregation                     gradients are summed per host before they cross the network
    boundary_among_servers                ops between summed gradients and updates run on servers
    boundary_between_workers_and_servers  light ops beside a pull run where less has to be sent
    replicate_variables                   workers read a variable of the servers once a step
    protocol                              between ranks: theirs is MPI's own
    """

    local_aggregation: bool = True
    boundary_among_servers: bool = True
    boundary_between_workers_and_servers: bool = True
    replicate_variables: bool = True
    protocol: str | None = None

    def __post_init__(self) -> None:
        at = "config.communication.ps"
        check_fields(self)
        if not self.replicate_variables:
            raise BadUsage(
                "workers read a variable of the servers once a step, into memory of their own",
                at=f"{at}.replicate_variables",
                fix="leave it True; large tables are read by rows anyway",
            )
        if self.protocol is not None:
            raise BadUsage(
                f"the protocol {self.protocol!r}: ranks speak MPI, which chooses its transport",
                at=f"{at}.protocol",
                fix="leave it out, or tell MPI by mpi=MPIConfig(mpirun_options=...)",
            )

    def without(self) -> tuple[Mechanism, ...]:
        """Return the mechanisms that are switched off."""
        switches: tuple[tuple[bool, Mechanism], ...] = (
            (self.local_aggregation, "local-aggregation"),
            (self.boundary_among_servers, "post-aggregation"),
            (self.boundary_between_workers_and_servers, "boundary-ops"),
        )
        return tuple(mechanism for is_on, mechanism in switches if not is_on)


@public_record
@dataclass(frozen=True, slots=True)
class MPIConfig:
    """What mpiexec is told besides: words, or one text that a shell would divide."""

    mpirun_options: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def words(self) -> tuple[str, ...]:
        """Return the options one by one."""
        options = self.mpirun_options
        return tuple(shlex.split(options) if isinstance(options, str) else options)


@public_record
@dataclass(frozen=True, slots=True)
class CommunicationConfig:
    """How servers and workers communicate."""

    ps: PSConfig = PSConfig()
    mpi: MPIConfig = MPIConfig()

    def __post_init__(self) -> None:
        check_fields(self)


@public_record
@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """When the training is saved into `ckpt_dir`: at its end, and after so many steps, or seconds.

    A training whose `ckpt_dir` has a checkpoint goes on from the newest. `keep`: so many stay.
    """

    ckpt_dir: str | Path | None = None
    save_ckpt_steps: int | None = None
    save_ckpt_secs: float | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        at = "config.checkpoints"
        check_fields(self)
        if self.ckpt_dir is None and (self.save_ckpt_steps is not None or self.save_ckpt_secs is not None):
            raise BadUsage(
                "a training is to be saved, but not where",
                at=f"{at}.ckpt_dir",
                fix="name a folder that all hosts see",
            )
        for name in ("save_ckpt_steps", "save_ckpt_secs", "keep"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise BadUsage(f"{name} of {value}", at=f"{at}.{name}", fix="give more than 0")

    def checkpoints(self) -> Checkpoints | None:
        """Return where and when a job saves, None if it does not."""
        if self.ckpt_dir is None:
            return None
        folder = str(Path(self.ckpt_dir).resolve())
        return Checkpoints(folder, self.save_ckpt_steps, self.save_ckpt_secs, self.keep)


@public_record
@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """The steps (from 1) that are timed, instruction by instruction; trace.json in `profile_dir` shows them.

    `profile_range`: the first step and the last, instead of single ones. `profile_worker`: of that replica's
    ranks alone; None: of all ranks.
    """

    profile_dir: str | Path | None = None
    profile_steps: Sequence[int] = ()
    profile_range: Sequence[int] | None = None
    profile_worker: int | None = None

    def __post_init__(self) -> None:
        at = "config.profile"
        check_fields(self)
        steps = self.profile_steps if self.profile_range is None else self.profile_range
        if (self.profile_dir is None) != (not steps):
            what, name, fix = (
                ("steps are to be timed, but not where to", "profile_dir", "name a folder")
                if self.profile_dir is None
                else ("no steps to be timed", "profile_steps", "name steps, or a profile_range")
            )
            raise BadUsage(what, at=f"{at}.{name}", fix=fix)
        if self.profile_range is not None and (self.profile_steps or len(self.profile_range) != 2):
            what = f"steps {list(self.profile_steps)} and range {list(self.profile_range)}"
            fix = "give profile_steps, or a profile_range of (first, last)"
            raise BadUsage(what, at=f"{at}.profile_range", fix=fix)
        if steps and (min(steps) < 1 or (self.profile_range is not None and steps[0] > steps[1])):
            raise BadUsage(
                f"no steps {list(steps)}", at=f"{at}.profile_steps", fix="count from 1, the first one first"
            )

    def traced_steps(self) -> TracedSteps:
        """Return the ranges of steps that are timed, 0 for none."""
        if self.profile_range is not None:
            return ((self.profile_range[0], self.profile_range[1]),)
        return tuple((step, step) for step in sorted(set(self.profile_steps))) or 0


@public_record
@dataclass(frozen=True, slots=True)
class SessionConfig:
    """How ranks compute.

    intra_op_threads    threads of every device, for one op; None: as the cluster says
    inter_op_threads    ops at once: 1, as a rank runs one segment after the other
    seed                of what a step draws; None: 0, or that of the checkpoint that training goes on from
    stop_when_diverged  end with an error when the loss is not finite
    """

    intra_op_threads: int | None = None
    inter_op_threads: int | None = None
    seed: int | None = None
    stop_when_diverged: bool = True

    def __post_init__(self) -> None:
        at = "config.session"
        check_fields(self)
        if self.intra_op_threads is not None and self.intra_op_threads < 1:
            raise BadUsage(
                f"{self.intra_op_threads} threads", at=f"{at}.intra_op_threads", fix="give 1 or more"
            )
        if self.inter_op_threads not in (None, 1):
            raise BadUsage(
                f"{self.inter_op_threads} ops at once: a rank runs one after the other",
                at=f"{at}.inter_op_threads",
                fix="leave it out, and give intra_op_threads",
            )


@public_record
@dataclass(frozen=True, slots=True)
class ParallaxConfig:
    """What the user may decide; everything else is partc's to choose.

    strategy           auto, hybrid, allreduce (MPI) or ps, or the path of a strategy.json
    average_dense      gradients are averaged over replicas; False: summed
    average_sparse     the same of indexed slices
    sync               replicas step together; False: they push and pull without waiting
    search_partitions  look for the best number of partitions of large variables; False: the fewest
    partitioner        where the search begins; None: variables are cut as balance wants
    fetch_gradients    parameters whose aggregated gradients may be fetched, as NAME.aggregated
    sizes              a value for every symbolic size
    options            what the graph's file does not say: bindings, sample axes, loss, initial values
    out                where the plan goes; None: a temporary folder, which goes with the process
    force              trained variables of an earlier plan in `out` may go
    timeout_s          the longest a step may take
    redirect_path      a folder that takes what each rank prints, a file for each; None: run.log alone
    """

    strategy: str = "auto"
    average_dense: bool = True
    average_sparse: bool = True
    sync: bool = True
    search_partitions: bool = True
    partitioner: Partitioner | None = None
    fetch_gradients: tuple[str, ...] = ()
    sizes: Mapping[str, int] | None = None
    options: GraphOptions | None = None
    out: str | Path | None = None
    force: bool = False
    timeout_s: float = 600.0
    communication: CommunicationConfig = CommunicationConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    profile: ProfileConfig = ProfileConfig()
    session: SessionConfig = SessionConfig()
    redirect_path: str | Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_timeout(self.timeout_s, "ParallaxConfig.timeout_s")
        if self.strategy in PARALLAX_ARCHITECTURES:
            raise BadUsage(
                f"{self.strategy!r} is Parallax's own name of a strategy",
                at="ParallaxConfig.strategy",
                fix=f"write {PARALLAX_ARCHITECTURES[self.strategy]!r}",
            )
        if self.strategy == "allreduce" and self.communication.ps != PSConfig():
            raise BadUsage(
                "settings of servers, where every worker keeps every variable",
                at="config.communication.ps, with strategy='allreduce'",
                fix="leave them out, or choose hybrid, ps or auto",
            )
        if not self.sync and (self.communication.mpi.words or self.profile.profile_dir is not None):
            name = "communication.mpi" if self.communication.mpi.words else "profile"
            what = "mpiexec" if self.communication.mpi.words else "steps of all ranks together"
            raise BadUsage(
                f"{what}, which training without waiting has not",
                at=f"config.{name}, with sync=False",
                fix="leave it out, or leave sync as it is",
            )

    @property
    def aggregation(self) -> Aggregation | None:
        """Return how gradients become one; None where nothing was asked: as a strategy file says."""
        aggregation = Aggregation(self.average_dense, self.average_sparse, tuple(self.fetch_gradients))
        return None if aggregation == Aggregation() else aggregation

    def partitions(self) -> Partitioner | None:
        """Return how large variables are cut."""
        if self.partitioner is None or self.search_partitions:
            return self.partitioner
        return replace(self.partitioner, search="off")

    def machines(self, cluster: Cluster) -> Cluster:
        """Return the cluster with what the user says of how its ranks are started, and of their threads."""
        options = (*cluster.mpiexec, *self.communication.mpi.words)
        threads = self.session.intra_op_threads
        hosts = cluster.hosts
        if threads is not None:
            hosts = tuple(
                msgspec.structs.replace(
                    host, devices=tuple(msgspec.structs.replace(d, threads=threads) for d in host.devices)
                )
                for host in hosts
            )
        return msgspec.structs.replace(cluster, hosts=hosts, mpiexec=options)
