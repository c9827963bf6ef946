"""Step times of pipelines against the limit that their bubble sets, in turn, between hosts at 1 Gbit/s.

    python benchmarks/pipelines.py [--stages 2] [--microbatches 8] [--works deep-mlp] [--locally]

Hosts are network namespaces of one machine (needs root and iproute2), a worker each; --locally: the
workers of this machine. One worker alone trains the same micro-batches in t; with m of them, s stages take
no less than t (m + s - 1) / (m s) (Huang et al. 2019, GPipe, section 2.3). Rounds go through all plans in
turn; a plan counts the median of its rounds.

    share   of the limit to the pipeline's step
    beside  the same with t of a worker while every other host's trains the same: cores that share a memory
            slow each other down, which hosts of their own do not
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
from deep_transformer import Sizes
from mesh_strategies import WORKS, mlp, step_s, transformer
from namespaces import namespace_hosts
from rows import write_rows

from partc.compiler.api import compile_step
from partc.compiler.options import Options
from partc.cost.cluster.cluster import Cluster, read_cluster

WORKS = WORKS | {
    "deep-mlp": mlp(*[1024] * 9, 64, batch=512),
    "deep-transformer": partial(
        transformer, Sizes(batch=16, time=64, heads=4, width=256, hidden=1024, vocabulary=2_000), 8
    ),
}
EXAMPLE = Path(__file__).parent.parent / "examples" / "cluster-1x4.json"


def main() -> None:
    """Compile, run, print one line per work."""
    options = _options()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder, _workers(options.stages, options.locally) as cluster:
        for work in options.works:
            rows.append(_measure(work, cluster, Path(folder) / work, options))
    for row in rows:
        print(
            "{work:16} alone {alone_ms:8.1f} ms  limit {limit_ms:8.1f}  pipeline {pipeline_ms:8.1f} "
            "(predicted {predicted_ms:8.1f})  data {data_ms:8.1f}  share {share:5.2f}  "
            "beside {beside:5.2f}".format(**row)
        )
    write_rows(rows, options.json)


def _measure(work: str, cluster: Cluster, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    split = f"microbatches={options.microbatches}"
    alone = {f"alone-{number}": (_only(cluster, number), split) for number in range(options.stages)}
    strategies = alone | {
        "pipeline": (cluster, f"pipeline={options.stages},{split}"),
        "data": (cluster, f"data={options.stages}"),
    }
    plans = {name: folder / name for name in strategies}
    predicted = {
        name: compile_step(
            WORKS[work](), machines, plans[name], Options(strategy=strategy, batch="global")
        ).timeline.step_s
        for name, (machines, strategy) in strategies.items()
    }
    times: dict[str, list[float]] = {name: [] for name in ("alone", "beside", "pipeline", "data")}
    for _ in range(options.rounds):
        times["alone"].append(step_s(plans["alone-0"]))
        with ThreadPoolExecutor() as pool:
            times["beside"].append(max(pool.map(step_s, [plans[name] for name in alone])))
        for name in ("pipeline", "data"):
            times[name].append(step_s(plans[name]))
    return _row(work, times, predicted["pipeline"], options.stages, options.microbatches)


def _only(cluster: Cluster, worker: int) -> Cluster:
    """Return a cluster of one of the workers."""
    devices = [(host, device) for host in cluster.hosts for device in host.devices]
    host, device = devices[worker]
    host = msgspec.structs.replace(host, devices=(device,))
    return msgspec.structs.replace(cluster, hosts=(host,), switches=(), links=())


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
    work: str, times: dict[str, list[float]], predicted_s: float, stages: int, microbatches: int
) -> dict[str, object]:
    ms = {name: 1e3 * statistics.median(rounds) for name, rounds in times.items()}
    bubble = (microbatches + stages - 1) / (microbatches * stages)
    return {
        "work": work,
        **{f"{name}_ms": value for name, value in ms.items()},
        "limit_ms": ms["alone"] * bubble,
        "predicted_ms": 1e3 * predicted_s,
        "share": ms["alone"] * bubble / ms["pipeline"],
        "beside": ms["beside"] * bubble / ms["pipeline"],
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["deep-mlp", "deep-transformer"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--locally", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
