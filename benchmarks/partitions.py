"""How many partitions a large table should have: what the cost model chooses, and a measured sweep.

    sudo python benchmarks/partitions.py --hosts 4 --mbit 200 --rounds 5 --json partitions.json

A language model whose tables live on servers is compiled for every number of partitions and trained on
hosts that are network namespaces; rounds go through all numbers in turn. The last line tells how much
slower the chosen number is than the best of the sweep: at most 3 % is asked for.
"""

import argparse
import tempfile
from pathlib import Path

from namespaces import namespace_hosts
from rows import write_rows

from partc.compiler.api import compile_step
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.options import Options, Partitioner
from partc.compiler.planning.choose_partitions import measure_partitions, quickest
from partc.cost.cluster.cluster import Cluster
from partc.models.catalogue import build_model
from partc.runtime.plan.plan_folder import PlanFolder, read_plan_folder

LM = {"vocab": 20_000, "embedding": 512, "cells": 16, "projection": 512, "batch": 8, "steps": 10}
LM |= {"samples": 2_000}
ALLOWED = 0.03


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = build_training_graph(build_model("lm", **LM), loss="loss", optimizer=SGD(0.1), folder=folder)
        with namespace_hosts(options.hosts, options.workers, options.mbit * 1e6) as cluster:
            rows = sweep(train, cluster, folder, options.rounds, options.steps)
    write_rows(rows, options.json)


def sweep(train: object, cluster: Cluster, folder: Path, rounds: int, steps: int) -> list[dict[str, object]]:
    """Print and return a row per number of partitions."""

    def compile_with(partitions: Partitioner | int, out: Path) -> PlanFolder:
        made = compile_step(train, cluster, out, Options(strategy="ps", partitions=partitions))
        searches.append(made.partitions)
        return read_plan_folder(out)

    searches: list = []
    compile_with(Partitioner(1, "model"), folder / "searched")
    search = searches[0]
    measured_s = measure_partitions(tuple(search.predicted_s), compile_with, rounds=rounds, steps=steps)
    best = quickest(measured_s)
    loss = measured_s[search.chosen] / measured_s[best] - 1
    print(f"{cluster.name}\npartitions  predicted communication   measured step   against the best")
    rows: list[dict[str, object]] = []
    for count, step_s in measured_s.items():
        ratio = step_s / measured_s[best]
        mark = "  <- chosen" if count == search.chosen else ""
        predicted_ms = search.predicted_s[count] * 1e3
        print(f"{count:10d}  {predicted_ms:18.1f} ms  {step_s * 1e3:11.1f} ms  {ratio:17.3f}{mark}")
        rows.append(
            {"work": "lm", "system": f"{count} partitions", "value": step_s, "unit": "s/step", "ratio": ratio}
        )
    print(
        f"chosen {search.chosen}, best {best}: {loss:+.1%} ({'within' if loss <= ALLOWED else 'MISSES'} 3 %)"
    )
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1, help="of each host")
    parser.add_argument("--mbit", type=float, default=200, help="of each host's link, in both directions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
