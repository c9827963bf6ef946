"""Step times of pipelines against the limit that their bubble sets, in turn, between hosts at 1 Gbit/s.

    python benchmarks/pipelines.py [--stages 2] [--microbatches 8] [--works deep-mlp] [--locally]

Hosts are network namespaces of one machine (needs root and iproute2), a worker each; --locally: the
workers of this machine. One worker alone trains the same micro-batches in t; with m of them, s stages take
no less than t (m + s - 1) / (m s) (Huang et al. 2019, GPipe, section 2.3). Rounds go through all plans in
turn; a plan counts the median of its rounds. `share`: of the limit to the pipeline's step.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from mesh_strategies import WORKS, _mlp, _step_s
from namespaces import namespace_hosts
from rows import write_rows

from partc.compiler.api import compile_step
from partc.compiler.options import Options
from partc.cost.cluster.cluster import Cluster, read_cluster

WORKS = WORKS | {
    "deep-mlp": _mlp(*[1024] * 9, 64, batch=512),
}
EXAMPLE = Path(__file__).parent.parent / "examples" / "cluster-1x4.json"


def main() -> None:
    """Compile, run, print one line per work."""
    options = _options()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, _workers(options.stages, options.locally) as cluster:
        for work in options.works:
            alone = msgspec.structs.replace(cluster, hosts=cluster.hosts[:1], switches=(), links=())
            first = alone.hosts[0]
            alone = msgspec.structs.replace(
                alone, hosts=(msgspec.structs.replace(first, devices=first.devices[:1]),)
            )
            strategies = {
                "alone": (alone, f"microbatches={options.microbatches}"),
                "pipeline": (cluster, f"pipeline={options.stages},microbatches={options.microbatches}"),
                "data": (cluster, f"data={options.stages}"),
            }
            plans = {name: Path(folder) / f"{work}-{name}" for name in strategies}
            predicted = {
                name: compile_step(
                    WORKS[work](), machines, plans[name], Options(strategy=strategy, batch="global")
                ).timeline.step_s
                for name, (machines, strategy) in strategies.items()
            }
            times: dict[str, list[float]] = {name: [] for name in plans}
            for _ in range(options.rounds):
                for name, plan in plans.items():
                    times[name].append(_step_s(plan))
            rows.append(_row(work, times, predicted, options.stages, options.microbatches))
    for row in rows:
        print(
            "{work:10} alone {alone_ms:8.1f} ms  limit {limit_ms:8.1f}  pipeline {pipeline_ms:8.1f} "
            "(predicted {predicted_ms:8.1f})  data {data_ms:8.1f}  share {share:5.2f}".format(**row)
        )
    write_rows(rows, options.json)


@contextmanager
def _workers(count: int, locally: bool) -> Iterator[Cluster]:
    if not locally:
        with namespace_hosts(count, 1, 1e9) as cluster:
            yield cluster
        return
    example = read_cluster(EXAMPLE)
    host = msgspec.structs.replace(example.hosts[0], devices=example.hosts[0].devices[:count])
    yield msgspec.structs.replace(example, hosts=(host,))


def _row(
    work: str, times: dict[str, list[float]], predicted: dict[str, float], stages: int, microbatches: int
) -> dict[str, object]:
    ms = {name: 1e3 * statistics.median(rounds) for name, rounds in times.items()}
    limit_ms = ms["alone"] * (microbatches + stages - 1) / (microbatches * stages)
    return {
        "work": work,
        "alone_ms": ms["alone"],
        "pipeline_ms": ms["pipeline"],
        "data_ms": ms["data"],
        "limit_ms": limit_ms,
        "predicted_ms": 1e3 * predicted["pipeline"],
        "share": limit_ms / ms["pipeline"],
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["deep-mlp", "lm"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--locally", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
