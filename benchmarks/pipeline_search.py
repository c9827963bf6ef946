"""What climbs among pipelines find against the quickest name, and how well the estimate ranks pipelines.

    python benchmarks/pipeline_search.py [--works deep-mlp ...] [--clusters 2x2 4x1] [--priced 60]
    python benchmarks/pipeline_search.py --works deep-mlp --run 3

All named strategies are priced by their simulated whole plans, then so many pipelines, without a time limit.
The rank correlation (Spearman's) is of estimates and whole plans of drawn pipelines. --run: on two hosts that
are network namespaces (needs root and iproute2), one worker each, at 1 Gbit/s; then what is found and the
quickest name also run, in turn, for so many rounds, of which the median counts.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import product
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
from mesh_strategies import step_s
from namespaces import namespace_hosts
from pipelines import WORKS
from rows import write_rows

from partc.compiler.api import compile_step
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.search.pipelines.climb_pipelines import PipelineClimb, climb_pipelines
from partc.compiler.search.pipelines.estimate_pipelines import PipelineEstimate
from partc.compiler.search.pipelines.step_pipelines import StepPipelines
from partc.compiler.search.whole_steps import Priced, WholeSteps, names_for
from partc.cost.cluster.cluster import Cluster, read_cluster
from partc.cost.cluster.machines import Link
from partc.cost.strategy import Strategy
from partc.passes.search.stages.pipeline_space import Pipeline

EXAMPLE = Path(__file__).parent.parent / "examples" / "cluster-2x2.json"
GBIT = 125e6


def _hosts_of_one(count: int) -> Cluster:
    """Return hosts of one worker each behind a switch, at 1 Gbit/s."""
    example = read_cluster(EXAMPLE)
    host = example.hosts[0]
    hosts = tuple(
        msgspec.structs.replace(
            host,
            name=f"host{n}",
            devices=(msgspec.structs.replace(host.devices[0], name=f"host{n}/cpu0"),),
        )
        for n in range(count)
    )
    links = tuple(Link((each.name, "switch"), bytes_per_s=GBIT, latency_s=25e-6) for each in hosts)
    name = f"{count} hosts of one worker"
    return msgspec.structs.replace(example, name=name, hosts=hosts, switches=("switch",), links=links)


CLUSTERS = {"2x2": read_cluster(EXAMPLE), "4x1": _hosts_of_one(4)}


class Work:
    """A step on a cluster, its names priced."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        self.model, self.cluster = WORKS[name](), cluster
        self.label = f"{name}, {cluster.name}"
        self.whole = WholeSteps(lambda: import_training_graph(self.model), cluster, Options(batch="global"))
        self.data = self.whole("auto", "auto")
        assert self.data is not None and self.whole.first is not None
        tried = [self.whole(each, each) for each in names_for(self.whole.first.worker_hosts)]
        self.named = [self.data, *(priced for priced in tried if priced is not None)]
        self.pipelines = StepPipelines(self.whole.first)
        self.estimate = PipelineEstimate(self.pipelines)

    def price_s(self, pipeline: Pipeline) -> float:
        priced = self.whole("", self.pipelines.strategy(pipeline))
        return inf if priced is None else priced.step_s

    def climb(self, most: int, seed: int) -> PipelineClimb:
        read = {self.pipelines.read(named.strategy): named.step_s for named in self.named}
        return climb_pipelines(
            self.pipelines.space,
            {pipeline: step_s for pipeline, step_s in read.items() if pipeline is not None},
            self.price_s,
            self.estimate.step_s,
            lambda priced: priced < most,
            lambda: True,
            np.random.default_rng(seed),
        )

    def drawn(self, count: int) -> dict[Pipeline, float]:
        rng = np.random.default_rng(1)
        return {pipeline: self.price_s(pipeline) for _ in range(count) if (pipeline := self._draw(rng))}

    def _draw(self, rng: np.random.Generator) -> Pipeline:
        return self.pipelines.space.draw(rng)

    def correlation(self, prices: Mapping[Pipeline, float]) -> float:
        possible = [p for p, step_s in prices.items() if step_s < inf]
        columns = [prices[p] for p in possible], [self.estimate.step_s(p) for p in possible]
        return float(np.corrcoef([np.argsort(np.argsort(column)) for column in columns])[0, 1])


def _row(work: Work, asked: argparse.Namespace) -> dict[str, object]:
    begun_s = time.monotonic()
    climb = work.climb(asked.priced, asked.seed)
    climbed_s = time.monotonic() - begun_s
    best = min(climb.prices, key=climb.prices.__getitem__)
    name: Priced = min(work.named, key=lambda named: named.step_s)
    begun_s = time.monotonic()
    work.estimate.step_s(best)
    return {
        "work": work.label,
        "data_ms": 1e3 * work.named[0].step_s,
        "name": name.name,
        "name_ms": 1e3 * name.step_s,
        "found": work.pipelines.describe(best, None),
        "found_ms": 1e3 * climb.prices[best],
        "priced": climb.priced,
        "seconds": climbed_s,
        "is_optimal": best in climb.optimal,
        "estimate_ms": 1e3 * (time.monotonic() - begun_s),
        "correlation": work.correlation(work.drawn(asked.drawn)) if asked.drawn else 1.0,
        **(_run(work, name.strategy, work.pipelines.strategy(best), asked.run) if asked.run else {}),
    }


def _run(work: Work, named: Strategy, found: Strategy, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of steps that ran, of the quickest name and of what was found."""
    times: dict[str, list[float]] = {"name_ran_ms": [], "found_ran_ms": []}
    with TemporaryDirectory() as folder:
        plans = {key: Path(folder) / key for key in times}
        for (_, plan), strategy in zip(plans.items(), (named, found), strict=True):
            compile_step(work.model, work.cluster, plan, Options(strategy=strategy, batch="global"))
        for _ in range(rounds):
            for key, plan in plans.items():
                times[key].append(1e3 * step_s(plan))
    return {key: statistics.median(each) for key, each in times.items()}


def main() -> None:
    """Measure, print a line for each work, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["deep-mlp", "lm", "transformer"])
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--priced", type=int, default=60)
    parser.add_argument("--drawn", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--run", type=int, default=0, help="rounds")
    asked = parser.parse_args()
    rows = []
    with namespace_hosts(2, 1, 8 * GBIT) if asked.run else nullcontext() as own:
        clusters = [CLUSTERS[each] for each in asked.clusters] if own is None else [own]
        for name, cluster in product(asked.works, clusters):
            rows.append(_row(Work(name, cluster), asked))
            line = (
                "{work}: data {data_ms:.1f} ms  {name} {name_ms:.1f}  found {found_ms:.1f} ({found}) "
                "{priced} priced in {seconds:.0f} s, optimal {is_optimal}, correlation {correlation:.2f}, "
                "an estimate {estimate_ms:.1f} ms"
            )
            if asked.run:
                line += "  ran: name {name_ran_ms:.1f} ms, found {found_ran_ms:.1f} ms"
            print(line.format(**rows[-1]), flush=True)
    write_rows(rows, asked.json)


if __name__ == "__main__":
    main()
