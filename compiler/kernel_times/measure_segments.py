"""What a plan's segments take on this machine's CPU, measured once and kept.

    key      SHA-256 of the segment (ops, attributes, shapes, dtypes), threads, the onnxruntime, the CPU;
             the shapes and dtypes of the inputs that a batch is drawn for
    value    seconds of a run, or of drawing a rank's batch, the median, alone on the machine

All ranks run in this process, one after the other, on synthetic data: what a segment reads is what it
reads in training, and no rank takes time from another. Whole segments are measured rather than single
ops, for they are what onnxruntime runs, with its fusions (docs/decisions/008-segments-are-measured.md).
"""

import hashlib
import os
import platform
import time
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import onnx
import onnxruntime

from partc.cost.simulation.timeline import Measured
from partc.runtime.data.feeds import Source, open_source
from partc.runtime.data.step_draws import draw_share
from partc.runtime.errors import UnsupportedModel
from partc.runtime.execution.in_process import RanksInProcess
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Plan, Rank, Run, instructions_of
from partc.runtime.whole_file import write_whole

STEPS = 10
CACHE = "PARTC_CACHE"  # environment variable: another folder


def cache_file() -> Path:
    """Return where times are kept."""
    base = os.environ.get(CACHE) or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "partc"
    return Path(base) / "segments.json"


def measure_segments(folder: PlanFolder) -> Measured:
    """Return the times of every segment of the plan. Raises UnsupportedModel for GPUs and sessions."""
    plan = folder.plan
    if plan.asynchronous:
        raise UnsupportedModel(
            "segments of sessions cannot be measured: nobody steps in lockstep with their servers",
            at="--measure",
            fix="leave it out, or measure the same step compiled without --asynchronous",
        )
    if any(rank.kind == "gpu" for rank in plan.ranks):
        raise UnsupportedModel(
            "segments of GPUs cannot be measured on this machine's CPU",
            at="--measure",
            fix="leave it out: GPUs are priced from their profiles",
        )
    paths = {run.segment for rank in plan.ranks for run in _runs(plan, rank)}
    computed = {path: _sha256_of_computation(folder.path / path) for path in sorted(paths)}
    keys = {
        run.segment: _key(computed[run.segment], rank, run)
        for rank in plan.ranks
        for run in _runs(plan, rank)
    }
    batch = _batch_key(plan)
    seconds_by_key = _read_cache()
    if not {*keys.values(), batch} <= seconds_by_key.keys():
        measurement = _measure(folder)
        seconds_by_key |= {keys[segment]: seconds for segment, seconds in measurement.segments.items()}
        seconds_by_key[batch] = measurement.beside_s
        _write_cache(seconds_by_key)
    return Measured({segment: seconds_by_key[key] for segment, key in keys.items()}, seconds_by_key[batch])


def _runs(plan: Plan, rank: Rank) -> list[Run]:
    return [instruction for instruction in instructions_of(plan, rank) if isinstance(instruction, Run)]


def _sha256_of_computation(path: Path) -> str:
    """Return the hash of what a segment computes: its place in a step and its ranks do not count."""
    model = onnx.load(path)
    del model.metadata_props[:]
    model.producer_version = model.doc_string = model.graph.doc_string = model.graph.name = ""
    for node in model.graph.node:
        del node.metadata_props[:]
    return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()


def _key(computation: str, rank: Rank, run: Run) -> str:
    threads = 1 if run.one_thread else rank.threads
    return "/".join([computation, str(threads), onnxruntime.__version__, cpu_name()])


def _batch_key(plan: Plan) -> str:
    inputs = (plan.data_inputs, plan.drawn_inputs)
    text = repr((inputs, sorted(plan.sizes.items()), plan.batch, plan.replicas))
    return "/".join(["batch", hashlib.sha256(text.encode()).hexdigest(), np.__version__, cpu_name()])


def cpu_name() -> str:
    """Return what this machine's CPU is called."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _measure(folder: PlanFolder) -> Measured:
    plan = folder.plan
    ranks = RanksInProcess(folder, traced_steps=STEPS - 1)
    source = open_source("synthetic", plan)
    for step in range(STEPS):
        ranks.step(source.total(step))
    draw_times_s = [_draw_s(plan, source, step) for step in range(STEPS)]
    times_s: dict[str, list[float]] = {}
    for rank in plan.ranks:
        program, steps = instructions_of(plan, rank), ranks.recorders[rank.rank].steps()
        for index, instruction in enumerate(program):
            if isinstance(instruction, Run):
                took_s = median(step.end_s[index] - step.begin_s[index] for step in steps)
                times_s.setdefault(instruction.segment, []).append(took_s)
    return Measured(
        {segment: sum(times) / len(times) for segment, times in times_s.items()}, median(draw_times_s)
    )


def _draw_s(plan: Plan, source: Source, step: int) -> float:
    """Return the seconds in which a rank draws what it is fed."""
    worker = next(rank for rank in plan.ranks if rank.replica is not None)
    begun_s = time.perf_counter()
    feeds = source.share(worker, step)
    draw_share(plan, worker, feeds, step, seed=0)
    return time.perf_counter() - begun_s


def _read_cache() -> dict[str, float]:
    try:
        return msgspec.json.decode(cache_file().read_bytes(), type=dict[str, float])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}  # a cache that cannot be read is made anew


def _write_cache(times_s: dict[str, float]) -> None:
    write_whole(cache_file(), msgspec.json.format(msgspec.json.encode(times_s, order="sorted"), indent=1))
