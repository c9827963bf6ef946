"""Compile a plan again for the hosts that are left when some are lost.

    OUT/train.onnx, cluster.json without hosts, the strategy asked for ─> OUT/on-3-hosts/

The folder of a plan has all that follows from the model, and what was asked of the compiler. A mode and a
name (fsdp, tensor=2) are asked for again; of a user's own file what says nothing of hosts that are gone. What
fits the smaller cluster no more, and what a search found, gives way to `auto`. Variables begin as in the
first plan, or in a checkpoint.
"""

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import PLACED, SEARCH, Options
from partc.compiler.output.materialise import CLUSTER, STRATEGY
from partc.compiler.output.plan_files import INITIAL
from partc.compiler.pipeline import COMPILE, write_plan
from partc.compiler.search.decide_strategy import decide_strategy
from partc.cost.cluster.cluster import Cluster, read_cluster
from partc.cost.strategy import Strategy, read_strategy
from partc.runtime.engines.lost_hosts import lost_hosts
from partc.runtime.engines.machines import machines_of
from partc.runtime.errors import PartcError, RankFailed
from partc.runtime.plan.plan_folder import PLAN_FILE, PlanFolder, read_plan_folder
from partc.runtime.plan.plan_json import encode_plan

AUTO = "auto"


class HostsLeft:
    """The plan of a training that goes on without hosts that were lost: `folder`, the first one or another.

    `at_least`: with so many hosts; 0: a training goes on with all, or not at all.
    """

    def __init__(self, folder: PlanFolder, at_least: int, tell: Callable[[str], None]) -> None:
        self.folder = folder
        self._first = folder
        self._at_least = at_least
        self._tell = tell

    def look(self) -> None:
        """See which hosts start processes, and compile for these if some do not. Raises RankFailed."""
        if not self._at_least:
            return
        cluster = read_cluster(self._first.path / CLUSTER)
        hosts = [host.name for host in cluster.hosts]
        lost = lost_hosts(hosts, machines_of(self._first.path))
        left = len(hosts) - len(lost)
        if left < self._at_least:
            raise RankFailed(
                f"{left} of {len(hosts)} hosts are left, {self._at_least} are asked for at least",
                at=f"no process can be started on {', '.join(lost)}",
                fix="mend them, and go on with --resume; or ask for fewer with --min-hosts",
            )
        if set(hosts) - set(lost) == {rank.host for rank in self.folder.plan.ranks}:
            return
        if not lost:
            self.folder = self._first
            self._tell(f"all {left} hosts can be reached again")
            return
        out = self._first.path / f"on-{left}-hosts"
        self.folder, how = recompile_without(self._first, lost, out)
        self._tell(
            f"{', '.join(lost)} cannot be reached: compiled for the other {left} hosts, {how} -> {out}"
        )


def recompile_without(folder: PlanFolder, lost: Collection[str], out: Path) -> tuple[PlanFolder, str]:
    """Compile the model of a plan for its cluster without some hosts, into `out`; say with which strategy.

    Raises PartcError.
    """
    own = read_strategy(folder.path / STRATEGY)
    cluster = without_hosts(read_cluster(folder.path / CLUSTER), lost)
    named = folder.plan.asked_strategy
    name = f"--strategy {named}" if named else "the same strategy file"
    why = "found for all hosts"
    if named not in (SEARCH, PLACED):
        try:
            _compile(folder, cluster, named or _without_owners(own, lost), own, out)
            return _begun_alike(folder, out), name
        except PartcError as error:
            if named == AUTO:
                raise
            why = f"no more possible ({error.what})"
    _compile(folder, cluster, AUTO, own, out)
    return _begun_alike(folder, out), f"--strategy {AUTO}, since {name} is {why}"


def _compile(
    folder: PlanFolder, cluster: Cluster, strategy: str | Strategy, own: Strategy, out: Path
) -> None:
    plan = folder.plan
    options = Options(
        strategy=strategy,
        batch=plan.batch,
        sizes=plan.sizes,
        asynchronous=bool(plan.asynchronous),
        aggregation=own.aggregation,
        recompute_bytes=own.recompute_bytes,
        round_sums=own.round_sums,
        force=True,
    )
    model = folder.path / plan.model
    compilation = decide_strategy(
        lambda: import_training_graph(model, needs_initial=False), cluster, options, COMPILE
    )
    write_plan(compilation, out)


def _without_owners(strategy: Strategy, lost: Collection[str]) -> Strategy:
    """Leave open who owns the rows of a parameter of which a lost host owned some."""
    parameters = {
        name: msgspec.structs.replace(how, shards=())
        if any(shard.host in lost for shard in how.shards)
        else how
        for name, how in strategy.parameters.items()
    }
    return msgspec.structs.replace(strategy, parameters=parameters)


def without_hosts(cluster: Cluster, lost: Collection[str]) -> Cluster:
    """Return a cluster without some hosts and what links them. Raises BadCluster where it falls apart."""
    lost_names = {
        device.name for host in cluster.hosts if host.name in lost for device in host.devices
    } | set(lost)
    return msgspec.structs.replace(
        cluster,
        hosts=tuple(host for host in cluster.hosts if host.name not in lost),
        links=tuple(link for link in cluster.links if lost_names.isdisjoint(link.ends)),
    )


def _begun_alike(first: PlanFolder, out: Path) -> PlanFolder:
    """Give the variables of a plan the first values that another plan of its model gives them."""
    plan = read_plan_folder(out).plan
    initials = {variable.name: variable.initial for variable in first.plan.variables}
    files = {
        name: sha256
        for name, sha256 in first.plan.files.items()
        if name == INITIAL or name.startswith("initial/")
    }
    for name in files:
        (out / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(first.path / name, out / name)
    variables = tuple(
        msgspec.structs.replace(variable, initial=initials[variable.name]) for variable in plan.variables
    )
    alike = msgspec.structs.replace(plan, variables=variables, files=plan.files | files)
    (out / PLAN_FILE).write_bytes(encode_plan(alike))
    return read_plan_folder(out)
