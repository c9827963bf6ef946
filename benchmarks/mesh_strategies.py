r"""Step times of strategies on meshes against data parallelism, in turn, between hosts at 1 Gbit/s.

    python benchmarks/mesh_strategies.py [--hosts 2] [--works wide-mlp] [--strategies ...] [--json FILE]
    python benchmarks/mesh_strategies.py --works alexnet --strategies allreduce one-weird-trick --batch global
    python benchmarks/mesh_strategies.py --works resnet50 --strategies allreduce spatial=2 --batch global
    python benchmarks/mesh_strategies.py --hosts 1 --workers 2 --works stacked-lstm \
        --strategies allreduce layerwise

Hosts are network namespaces of one machine (needs root and iproute2), of one or more workers. Rounds go
through all strategies in turn; a strategy counts the median of its rounds. `ratio`: of `allreduce`'s step to
its own.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import onnx
from deep_transformer import DeepTransformer, Sizes
from namespaces import namespace_hosts
from rows import write_rows

from partc.compiler.api import compile_step
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import Adagrad, Momentum
from partc.compiler.options import Options
from partc.models.catalogue import build_model
from partc.runtime.jobs.runner import Runner

STRATEGIES = ("allreduce", "auto", "tensor=2", "fsdp")
STEPS = 12
TOKENS_256 = Sizes(batch=8, time=32, heads=4, width=256, hidden=1024, vocabulary=2_000)


def mlp(*sizes: int, batch: int) -> Callable[[], onnx.ModelProto]:
    """Return what builds a training step of dense layers."""

    def build() -> onnx.ModelProto:
        forward = build_model("mlp", sizes=sizes, batch=batch)
        return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.1))

    return build


def _lm() -> onnx.ModelProto:
    sizes = {"vocab": 2_000, "embedding": 256, "cells": 512, "projection": 256, "steps": 8, "samples": 256}
    return build_training_graph(build_model("lm", batch=16, **sizes), loss="loss", optimizer=Adagrad(0.1))


def _alexnet() -> onnx.ModelProto:
    path = Path(onnx.__file__).parent / "backend/test/data/light/light_bvlc_alexnet.onnx"
    return build_training_graph(
        onnx.load(path), loss="softmax_cross_entropy", optimizer=Momentum(0.01), batch_size=16, reinit=0
    )


def _resnet() -> onnx.ModelProto:
    forward = build_model("resnet50", batch=4, width=16, image=256, classes=100)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=Momentum(0.01))


def _stacked_lstm() -> onnx.ModelProto:
    sizes = {"layers": 4, "steps": 16, "cells": 512, "embedding": 512, "vocab": 2_000}
    forward = build_model("rnnlm", batch=32, **sizes)
    return build_training_graph(forward, loss="loss", optimizer=Momentum(0.1))


def transformer(sizes: Sizes, blocks: int) -> onnx.ModelProto:
    """Return a training step of a transformer's blocks."""
    body = DeepTransformer(sizes)
    for _ in range(blocks):
        body.append_block()
    return build_training_graph(body.model(), loss="loss", optimizer=Momentum(0.1))


WORKS = {
    "alexnet": _alexnet,
    "resnet50": _resnet,
    "wide-mlp": mlp(1024, 4096, 2048, 2048, 64, batch=32),
    "mlp": mlp(512, 1024, 1024, 64, batch=64),
    "lm": _lm,
    "stacked-lstm": _stacked_lstm,
    "transformer": partial(transformer, TOKENS_256, 6),
}


def main() -> None:
    """Compile, run, print one line per work and strategy."""
    options = _options()
    rows: list[dict[str, object]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        namespace_hosts(options.hosts, options.workers, 1e9) as cluster,
    ):
        for work in options.works:
            plans = {
                name: Path(folder) / f"{work}-{number}" for number, name in enumerate(options.strategies)
            }
            predicted = {
                name: compile_step(
                    WORKS[work](), cluster, plan, Options(strategy=name, batch=options.batch)
                ).timeline.step_s
                for name, plan in plans.items()
            }
            times: dict[str, list[float]] = {name: [] for name in plans}
            for _ in range(options.rounds):
                for name, plan in plans.items():
                    times[name].append(step_s(plan))
            rows += _rows(work, times, predicted)
    for row in rows:
        line = "{work:10} {strategy:16} {ms:8.1f} ms measured {predicted_ms:8.1f} predicted {ratio:5.2f}x"
        print(line.format(**row))
    write_rows(rows, options.json)


def step_s(plan: Path) -> float:
    """Return the median step of a run, its first quarter left out."""
    times = Runner(plan).train("synthetic", STEPS, save=False, traced_steps=STEPS - STEPS // 4).times
    begun = [step.begin_s[0] for step in times[0].steps]
    return statistics.median(later - earlier for earlier, later in pairwise(begun))


def _rows(work: str, times: dict[str, list[float]], predicted: dict[str, float]) -> list[dict[str, object]]:
    medians = {name: statistics.median(rounds) for name, rounds in times.items()}
    return [
        {
            "work": work,
            "strategy": name,
            "ms": 1e3 * median,
            "predicted_ms": 1e3 * predicted[name],
            "ratio": medians["allreduce"] / median,
        }
        for name, median in medians.items()
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="of a host")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), help="allreduce among them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", choices=("per-replica", "global"), help="left out: as compile decides")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
