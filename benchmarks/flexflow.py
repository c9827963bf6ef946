"""FlexFlow's figures 7, 8, 10, 13 and 14 on its models and clusters, simulated (flexflow.txt, section 8).

    python benchmarks/flexflow.py [--figure 7] [--models nmt rnnlm ...] [--clusters p100 k80]
                                  [--devices 4 16 64] [--budget 30] [--seed 0] [--json FILE] [--plot FILE]
    python benchmarks/flexflow.py --figure 8      NMT on 64 K80
    python benchmarks/flexflow.py --figure 10a    Inception-v3 and NMT on 4 K80
    python benchmarks/flexflow.py --figure 10b    on 16 P100
    python benchmarks/flexflow.py --figure 13 --report FOLDER     Inception-v3 on 4 P100; 14: NMT

    data     data parallelism
    expert   one weird trick for convolutional networks, layers over devices for recurrent ones
    placed   the best of one device for each operator that `--strategy placed` finds: it stands in for
             REINFORCE's placements, which are not published (figure 10a)
    optcnn   the least sum of times, by OptCNN's dynamic program, `--method dp`
    found    what walks over operator groups find, from those before

`--report` keeps the plan of what was found; the report.html in its folder draws who computes what of each
operator.
Seconds of a step are those of whole plans, of which `found` is the quickest: of the best that walks saw and
of those before. Bytes sent are the task graph's, which walks go by, and whose seconds stand beside.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import onnx
from bar_plot import bar_plot
from rows import write_rows

from partc.compiler.compilation import Compilation
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options, SearchOptions
from partc.compiler.pipeline import DECIDE, compile_graph, run
from partc.compiler.search.operators.own_space import OwnSpace, make_tasks, space_of, strategy_of
from partc.compiler.search.operators.search_additively import solve_additively
from partc.compiler.search.operators.walk_chains import walk_rounds
from partc.compiler.search.operators.walk_tasks import BestStates, StepConfigs
from partc.compiler.search.place_operators import place_operators
from partc.compiler.search.search_limit import SearchLimit
from partc.compiler.settle_options import settle_options
from partc.compiler.task_graphs.step_tasks import StepTasks
from partc.cost.cluster.cluster import Cluster, read_cluster
from partc.cost.strategy import Strategy
from partc.models.catalogue import build_model
from partc.passes.search.operators.find_groups import OperatorGroup, find_groups
from partc.passes.search.operators.operator_space import data_parallel_config
from partc.passes.search.operators.read_configs import read_configs
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
PLANNED = 3  # of the best states that walks saw
MOST_DEVICES = {"p100": 16, "k80": 64}


@dataclass(frozen=True)
class Row:
    """A strategy's step: seconds, its samples, bytes sent, seconds of computing over all devices.

    step_s, task_graph_s   as a whole plan, and as walks see it
    search_s               that finding it took
    """

    work: str
    system: str
    step_s: float
    task_graph_s: float
    samples: int
    sent_bytes: float
    computing_s: float
    search_s: float = 0.0


@dataclass(frozen=True)
class Figure:
    """A figure of the paper: models, (cluster, devices), systems, and what the paper says of it."""

    models: tuple[str, ...]
    machines: tuple[tuple[str, int], ...]
    systems: tuple[str, ...]
    paper: str


FIGURES = {
    "7": Figure(
        tuple(MODELS),
        tuple((cluster, n) for cluster, most in MOST_DEVICES.items() for n in (4, 16, 64) if n <= most),
        ("expert",),
        "1.3 to 3.3 times as fast as the quicker of data parallelism and the expert's; ResNet-101 as fast",
    ),
    "8": Figure(
        ("nmt",), (("k80", 64),), ("expert",), "1.7 to 2.4 times as fast; 2 to 5.5 times fewer bytes"
    ),
    "10a": Figure(
        ("inception_v3", "nmt"),
        (("k80", 4),),
        ("placed",),
        "3.4 to 3.8 times as fast as REINFORCE's placement",
    ),
    "10b": Figure(
        tuple(MODELS),
        (("p100", 16),),
        ("expert", "optcnn"),
        "AlexNet and ResNet the same as OptCNN's, the others 1.2 to 1.6 times as fast",
    ),
    "13": Figure(
        ("inception_v3",),
        (("p100", 4),),
        ("expert", "optcnn"),
        "12 % less time, and 75 % less synchronisation, than data parallelism",
    ),
    "14": Figure(
        ("nmt",),
        (("p100", 4),),
        ("expert", "optcnn"),
        "layers of many parameters on few devices, the softmax divided by channels, layers side by side",
    ),
}


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

    def __init__(self, name: str, model: onnx.ModelProto, cluster: Cluster, samples: int = 64) -> None:
        self.name, self.samples = name, samples
        self._model, self._cluster = model, cluster
        self.first = self._decided("allreduce")
        analysis = self.first.analysis
        self.groups: tuple[OperatorGroup, ...] = find_groups(analysis.training, analysis.facts, analysis.main)
        self.tasks: StepTasks = make_tasks(self.first, self.groups)

    def _decided(self, strategy: str | Strategy) -> Compilation:
        training = import_training_graph(self._model)
        options = settle_options(Options(batch="global", strategy=strategy), training)
        compilation = Compilation(training, self._cluster, options)
        run(DECIDE, compilation)
        return compilation

    def row(self, system: str, state: StepConfigs, search_s: float) -> Row | None:
        """Return a state's row, None where it cannot be."""
        seen_s, tasks = self.tasks.begin(state), self.tasks
        if seen_s is None:
            return None
        sizes = self.samples, tasks.sent_bytes, tasks.computing_s
        with tempfile.TemporaryDirectory() as folder:
            step_s = self.compiled(state, Path(folder) / "plan")
        return Row(self.name, system, step_s, seen_s, *sizes, search_s)

    def state_of(self, strategy: str | Strategy) -> StepConfigs:
        """Return the configurations under a strategy. Raises PartcError where the model has none."""
        compilation = self._decided(strategy)
        return read_configs(compilation.analysis, compilation.strategy, self.groups)

    def placed(self, budget_s: float, seed: int) -> StepConfigs:
        """Return the best placement of operators on one device each."""
        options = Options(batch="global", search=SearchOptions(budget_s, seed))
        return self.state_of(
            place_operators(lambda: import_training_graph(self._model), self._cluster, options)
        )

    def compiled(self, state: StepConfigs, out: Path) -> float:
        """Write the plan of a state, and its report; return the plan's seconds of a step."""
        strategy = strategy_of(state, self.groups, self.first.worker_names, "global")
        options = Options(batch="global", strategy=strategy, force=True)
        training = import_training_graph(self._model)
        return compile_graph(training, self._cluster, out, options).timeline.step_s

    def least_sum(self, budget_s: float, seed: int) -> StepConfigs:
        """Return the answer of OptCNN's dynamic program. Raises PartcError where it cannot be used."""
        own = OwnSpace(self.first, self.groups)
        return solve_additively(own, "dp", SearchLimit(budget_s), seed).state

    def found(self, starts: list[StepConfigs], budget_s: float, seed: int) -> tuple[list[StepConfigs], int]:
        """Return the quickest states that walks find, the first first; and how many proposals there were."""
        space, rng = space_of(self.first, self.groups), np.random.default_rng(seed)
        starts = [*OwnSpace(self.first, self.groups).starts(), *starts]  # which compiles kernels, too
        until_s = time.monotonic() + budget_s
        best, until = BestStates(), partial(_part_until_s, until_s)
        proposals = sum(walk_rounds(self.tasks, space, starts, best, rng, until))
        return best.in_order()[:PLANNED], proposals


def _part_until_s(until_s: float, share: float) -> float:
    return time.monotonic() + share * (until_s - time.monotonic())


def experiment_of(name: str, cluster_name: str, devices: int) -> Experiment:
    """Return a model on the first devices of a cluster."""
    model, loss, _ = MODELS[name]
    samples = BATCH.get(name, 64)
    step = build_training_graph(build_model(model, batch=samples), loss=loss, optimizer=SGD(0.1))
    cluster = first_devices(read_cluster(EXAMPLES / CLUSTERS[cluster_name]), devices)
    return Experiment(f"{name}, {devices} {cluster_name}", step, cluster, samples)


def rows_of(
    own: Experiment, expert: str, systems: Sequence[str], budget_s: float, tables_s: float, seed: int
) -> tuple[list[Row], StepConfigs]:
    """Return the rows of data parallelism, of these systems, and of walks from them; and what walks found."""
    ways: Mapping[str, Callable[[], StepConfigs]] = {
        "expert": lambda: own.state_of(expert),
        "placed": lambda: own.placed(budget_s, seed),
        "optcnn": lambda: own.least_sum(tables_s, seed),
    }
    workers = own.first.workers
    states: dict[str, StepConfigs] = {"data": (data_parallel_config(workers),) * len(own.groups)}
    took = {"data": 0.0}
    for system in systems:
        begun_s = time.monotonic()
        try:
            states[system] = ways[system]()
        except PartcError as error:
            print(f"{own.name}, {system}: {error}", file=sys.stderr)
        took[system] = time.monotonic() - begun_s
    begun_s = time.monotonic()
    found, proposals = own.found(list(states.values()), budget_s, seed)
    found_s = time.monotonic() - begun_s
    print(f"{own.name}: {len(own.groups)} groups, {proposals} proposals", file=sys.stderr, flush=True)
    before = [(state, own.row(system, state, took[system])) for system, state in states.items()]
    tried = [*before, *((state, own.row("found", state, found_s)) for state in found)]
    best, quickest = min(((s, row) for s, row in tried if row is not None), key=lambda each: each[1].step_s)
    rows = [row for _, row in before if row is not None]
    return [*rows, replace(quickest, system="found", search_s=found_s)], best


def show(rows: Sequence[Row]) -> None:
    """Print the rows of a work, the first of which is data parallelism."""
    for row in rows:
        ratio = rows[0].step_s / row.step_s
        print(
            f"| {row.work} | {row.system} | {1e3 * row.step_s:.1f} | {1e3 * row.task_graph_s:.1f} "
            f"| {row.samples / row.step_s:,.0f} "
            f"| {ratio:.2f}x | {rows[-1].samples / rows[-1].step_s / (row.samples / row.step_s):.2f}x "
            f"| {row.sent_bytes / 1e6:.0f} | {row.computing_s:.2f} | {row.search_s:.0f} |",
            flush=True,
        )


def plot(rows: Sequence[Row], figure: str) -> str:
    """Return throughputs by work as bars, times data parallelism; of figure 8 time, bytes and computing."""
    data = {row.work: row for row in rows if row.system == "data"}
    title = f"FlexFlow's figure {figure}, simulated by partc"
    if figure == "8":
        (base,) = data.values()
        measures = {"seconds of a step": "step_s", "bytes sent": "sent_bytes", "computing": "computing_s"}
        groups = {
            words: {row.system: getattr(row, name) / getattr(base, name) for row in rows}
            for words, name in measures.items()
        }
        return bar_plot(groups, title=f"{title}: {base.work}", y="times data parallelism")
    groups = {
        work: {r.system: base.step_s / r.step_s for r in rows if r.work == work}
        for work, base in data.items()
    }
    return bar_plot(groups, title=title, y="throughput, times data parallelism")


def main() -> None:
    """Run, print a table in Markdown, write JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--figure", choices=FIGURES, default="7")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="fewer than the figure's")
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of a search")
    parser.add_argument("--tables", type=float, default=600.0, help="seconds of OptCNN's tables, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--report", type=Path, help="a folder for compiled plans of what was found")
    asked = parser.parse_args()
    figure = FIGURES[asked.figure]
    heads = "work | system | step, ms | seen by walks | samples/s | to data | found to this | sent, MB"
    print(f"| {heads} | computing of all, s | found in, s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows: list[Row] = []
    for cluster, devices in figure.machines:
        if cluster not in asked.clusters or devices not in asked.devices:
            continue
        for name in (name for name in figure.models if name in (asked.models or MODELS)):
            case = experiment_of(name, cluster, devices)
            own, found = rows_of(
                case, MODELS[name][2], figure.systems, asked.budget, asked.tables, asked.seed
            )
            show(own)
            if asked.report:
                case.compiled(found, asked.report / f"{name}-{devices}-{cluster}")
            rows += own
            write_rows(rows, asked.json)
            if asked.plot:
                asked.plot.write_text(plot(rows, asked.figure))
    print(f"\nFlexFlow's figure {asked.figure}: {figure.paper}")


if __name__ == "__main__":
    main()
