"""Compile a plan again for the hosts that are left when some are lost.

    OUT/train.onnx, cluster.json without hosts, strategy.json's sums ─ auto ─> OUT/on-3-hosts/

The folder of a plan has all that follows from the model; how the step was spread over hosts that are gone
says nothing about fewer, and so it is chosen anew. Variables begin as in the first plan, or in a checkpoint.
"""

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.output.materialise import CLUSTER, STRATEGY
from partc.compiler.output.plan_files import INITIAL
from partc.compiler.pipeline import COMPILE, write_plan
from partc.compiler.search.decide_strategy import decide_strategy
from partc.cost.cluster.cluster import Cluster, read_cluster
from partc.cost.strategy import read_strategy
from partc.runtime.engines.lost_hosts import lost_hosts
from partc.runtime.engines.machines import machines_of
from partc.runtime.errors import RankFailed
from partc.runtime.plan.plan_folder import PLAN_FILE, PlanFolder, read_plan_folder
from partc.runtime.plan.plan_json import encode_plan


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
        self.folder = recompile_without(self._first, lost, out)
        self._tell(f"{', '.join(lost)} cannot be reached: compiled for the other {left} hosts -> {out}")


def recompile_without(folder: PlanFolder, lost: Collection[str], out: Path) -> PlanFolder:
    """Compile the model of a plan for its cluster without some hosts, into `out`. Raises PartcError."""
    plan, strategy = folder.plan, read_strategy(folder.path / STRATEGY)
    options = Options(
        batch=plan.batch,
        sizes=plan.sizes,
        asynchronous=bool(plan.asynchronous),
        aggregation=strategy.aggregation,
        recompute_bytes=strategy.recompute_bytes,
        force=True,
    )
    cluster = without_hosts(read_cluster(folder.path / CLUSTER), lost)
    model = folder.path / plan.model
    compilation = decide_strategy(
        lambda: import_training_graph(model, needs_initial=False), cluster, options, COMPILE
    )
    write_plan(compilation, out)
    return _begun_alike(folder, out)


def without_hosts(cluster: Cluster, lost: Collection[str]) -> Cluster:
    """Return a cluster without some hosts and what links them. Raises BadCluster where it falls apart."""
    gone = {device.name for host in cluster.hosts if host.name in lost for device in host.devices} | set(lost)
    return msgspec.structs.replace(
        cluster,
        hosts=tuple(host for host in cluster.hosts if host.name not in lost),
        links=tuple(link for link in cluster.links if gone.isdisjoint(link.ends)),
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
