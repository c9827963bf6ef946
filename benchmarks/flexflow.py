"""FlexFlow's figures 7 and 8 on its models and clusters, simulated (flexflow.txt, section 8).

    python benchmarks/flexflow.py [--models nmt rnnlm ...] [--clusters p100 k80] [--devices 4 16 64]
                                  [--budget 30] [--seed 0] [--json FILE]

For every model, cluster and number of devices: data parallelism, the experts' strategy (one weird trick for
convolutional networks, layers over devices for recurrent ones) and what walks over operator groups find.
Seconds of a step and bytes sent are the task graph's; docs/search.md tells how far it is from plans.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import onnx

from partc.compiler.compilation import Compilation
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.pipeline import DECIDE, run
from partc.compiler.planning.own_space import make_tasks, space_of
from partc.compiler.planning.step_tasks import StepTasks
from partc.compiler.planning.walk_chains import walk_chains
from partc.compiler.planning.walk_tasks import State, fewer_replicas
from partc.compiler.settle_options import settle_options
from partc.cost.cluster.cluster import Cluster, read_cluster
from partc.models.catalogue import build_model
from partc.passes.search.find_groups import OperatorGroup, find_groups
from partc.passes.search.operator_space import data_parallel_config
from partc.passes.search.read_configs import read_configs
from partc.runtime.errors import PartcError

EXAMPLES = Path(__file__).parent.parent / "examples"
CLUSTERS = {"p100": "cluster-4x4-p100.json", "k80": "cluster-16x4-k80.json"}
MODELS = {  # figure 7's, and the experts of section 8.2
    "alexnet": ("alexnet", "softmax_cross_entropy", "one-weird-trick"),
    "inception_v3": ("inception_v3", "softmax_cross_entropy", "one-weird-trick"),
    "resnet101": ("resnet101", "softmax_cross_entropy", "one-weird-trick"),
    "rnntc": ("rnntc", "softmax_cross_entropy", "layerwise"),
    "rnnlm": ("rnnlm", "loss", "layerwise"),
    "nmt": ("flexflow_nmt", "loss", "layerwise"),
}
BATCH = {"alexnet": 256}  # 64 for the others


@dataclass(frozen=True)
class Row:
    """A strategy's step: seconds, bytes sent, seconds of computing over all devices."""

    work: str
    system: str
    step_s: float
    sent_bytes: float
    computing_s: float


def first_devices(cluster: Cluster, devices: int) -> Cluster:
    """Return the cluster's first hosts, which have so many devices."""
    hosts, left = [], devices
    for host in cluster.hosts:
        if left > 0:
            hosts.append(msgspec.structs.replace(host, devices=host.devices[:left]))
            left -= len(host.devices)
    names = {host.name for host in cluster.hosts} - {host.name for host in hosts}
    gone = {d.name for h in cluster.hosts for d in h.devices} - {d.name for h in hosts for d in h.devices}
    links = tuple(link for link in cluster.links if not (names | gone) & set(link.ends))
    return msgspec.structs.replace(cluster, hosts=tuple(hosts), links=links)


class Experiment:
    """A model on devices."""

    def __init__(self, name: str, model: onnx.ModelProto, cluster: Cluster) -> None:
        self.name = name
        self._model, self._cluster = model, cluster
        self.first = self._decided("allreduce")
        analysis = self.first.analysis
        self.groups: tuple[OperatorGroup, ...] = find_groups(analysis.training, analysis.facts, analysis.main)
        self.tasks: StepTasks = make_tasks(self.first, self.groups)

    def _decided(self, strategy: str) -> Compilation:
        training = import_training_graph(self._model)
        options = settle_options(Options(batch="global", strategy=strategy), training)
        compilation = Compilation(training, self._cluster, options)
        run(DECIDE, compilation)
        return compilation

    def row(self, system: str, state: State) -> Row | None:
        """Return a state's row, None where it cannot be."""
        step_s = self.tasks.begin(state)
        if step_s is None:
            return None
        return Row(self.name, system, step_s, self.tasks.sent_bytes, self.tasks.computing_s)

    def expert(self, strategy: str) -> State | None:
        """Return the expert's configurations, None where the model has none."""
        try:
            compilation = self._decided(strategy)
        except PartcError as error:
            print(f"{self.name}, {strategy}: {error}", file=sys.stderr)
            return None
        return read_configs(compilation.analysis, compilation.strategy, self.groups)

    def found(self, starts: list[State], budget_s: float, seed: int) -> tuple[State, int]:
        """Return the quickest state that walks find, and how many proposals there were."""
        until_s, rng = time.monotonic() + budget_s, np.random.default_rng(seed)
        space = space_of(self.first, self.groups)
        starts = [fewer_replicas(self.tasks, space), *starts]
        best, proposals = walk_chains(self.tasks, space, starts, rng, until_s)
        return best.in_order()[0], proposals


def experiment(name: str, cluster_name: str, devices: int, budget_s: float, seed: int) -> list[Row]:
    """Return the rows of a model on the first devices of a cluster."""
    model, loss, expert = MODELS[name]
    forward = build_model(model, batch=BATCH.get(name, 64))
    step = build_training_graph(forward, loss=loss, optimizer=SGD(0.1))
    cluster = first_devices(read_cluster(EXAMPLES / CLUSTERS[cluster_name]), devices)
    own = Experiment(f"{name}, {devices} {cluster_name}", step, cluster)
    data: State = (data_parallel_config(devices),) * len(own.groups)
    by_expert = own.expert(expert)
    starts = [state for state in (data, by_expert) if state is not None]
    state, proposals = own.found(starts, budget_s, seed)
    rows = [
        own.row("data", data),
        None if by_expert is None else own.row("expert", by_expert),
        own.row("found", state),
    ]
    print(f"{own.name}: {len(own.groups)} groups, {proposals} proposals", file=sys.stderr, flush=True)
    return [row for row in rows if row is not None]


def main() -> None:
    """Run, print a table in Markdown, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of a search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    print("| work | system | step, ms | to data parallelism | sent, MB | computing of all, s |")
    print("|---|---|---|---|---|---|")
    rows: list[Row] = []
    for cluster in asked.clusters:
        for devices in (n for n in asked.devices if n <= (16 if cluster == "p100" else 64)):
            for name in asked.models:
                own = experiment(name, cluster, devices, asked.budget, asked.seed)
                for row in own:
                    ratio = own[0].step_s / row.step_s
                    print(
                        f"| {row.work} | {row.system} | {1e3 * row.step_s:.1f} | {ratio:.2f}x "
                        f"| {row.sent_bytes / 1e6:.0f} | {row.computing_s:.2f} |",
                        flush=True,
                    )
                rows += own
                if asked.json:
                    asked.json.write_text(json.dumps([msgspec.to_builtins(r) for r in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
