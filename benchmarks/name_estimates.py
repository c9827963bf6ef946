"""How far the estimates by which `auto` leaves names out are from plans, and what they would have missed.

    python benchmarks/name_estimates.py [--models mlp ...] [--clusters FILE ...] [--most 24] [--json FILE]

Of every model and cluster data parallelism and the names that promise most are priced by their whole plans;
per kind: estimate / price, least, median and greatest, and the names that are quicker than data
parallelism and than every name before them though their least step is longer than that.
"""

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from auto_names import EXAMPLES, LOSSES
from rows import write_rows

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.planning.stopwatch import paused_collection
from partc.compiler.search.rank_names import rank_names
from partc.compiler.search.whole_steps import WholeSteps, names_for
from partc.cost.cluster.cluster import read_cluster
from partc.models.catalogue import build_model

CLUSTERS = ("cluster-8x6-titanxp", "cluster-4x4-p100", "cluster-2x2", "cluster-1x4")


@dataclass(frozen=True)
class Estimated:
    """A name's estimate, its least step, and its price, seconds; and the quickest step before it."""

    model: str
    cluster: str
    name: str
    kind: str
    estimated_s: float
    least_s: float
    priced_s: float
    quickest_s: float

    @property
    def is_missed(self) -> bool:
        """Tell whether the name is left out though it is the quickest."""
        return self.priced_s < self.quickest_s < self.least_s


def kind_of(name: str) -> str:
    """Return what words a name has."""
    return "+".join(word.partition("=")[0] for word in name.split(","))


@paused_collection()
def estimated(model: str, cluster_file: Path, batch: int, most: int) -> list[Estimated]:
    """Return the names that promise most, priced."""
    step = build_training_graph(build_model(model, batch=batch), loss=LOSSES[model], optimizer=SGD(0.1))
    whole = WholeSteps(
        lambda: import_training_graph(step), read_cluster(cluster_file), Options(batch="global")
    )
    alone = whole("allreduce", "allreduce")
    assert whole.first is not None, "it was priced"
    first = whole.first_of_fixed_sizes
    names = names_for(first.worker_hosts)
    quickest_s = alone.step_s if alone is not None else float("inf")
    rows: list[Estimated] = []
    for promise in rank_names(first, names, alone and alone.step_s)[:most]:
        if (priced := whole(promise.name, promise.name)) is not None:
            times = promise.estimated_s, promise.least_s, priced.step_s, quickest_s
            rows.append(Estimated(model, cluster_file.stem, promise.name, kind_of(promise.name), *times))
            quickest_s = min(quickest_s, priced.step_s)
    return rows


def main() -> None:
    """Price, print a table in Markdown, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=LOSSES, default=["mlp", "lenet", "alexnet", "lm"])
    parser.add_argument(
        "--clusters", nargs="+", type=Path, default=[EXAMPLES / f"{name}.json" for name in CLUSTERS]
    )
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--most", type=int, default=24, help="names of a model and cluster")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows: list[Estimated] = []
    for model in asked.models:
        for cluster in asked.clusters:
            rows += estimated(model, cluster, asked.batch, asked.most)
            write_rows(rows, asked.json)
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        ratios[row.kind].append(row.estimated_s / row.priced_s)
    print("| names | priced | estimate / price: least | median | greatest |")
    print("| --- | --- | --- | --- | --- |")
    for kind, of in sorted(ratios.items()):
        print(f"| {kind} | {len(of)} | {min(of):.2f} | {median(of):.2f} | {max(of):.2f} |")
    missed = [f"{row.name} of {row.model} on {row.cluster}" for row in rows if row.is_missed]
    print(f"{len(rows)} names; missed: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
