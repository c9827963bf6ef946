"""Time one training step of partc and of PyTorch eager: one thread of one CPU, or one GPU, in one run.

    python benchmarks/single_device.py [--work resnet50 gpt2 lm] [--steps 7] [--gpu] [--json FILE]

Each system has a process of its own, so that its peak memory is its own. Their steps take turns, so that
whatever else the machine does falls on both; the medians are compared. Needs partc with its `peers` extra.
On a GPU partc is timed alone where PyTorch has none, and the memory is the host's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rows import Row, write_rows
from sizes import TARGETS, WORKS

from partc.runtime.engines.host_check import gpu_lacks

SYSTEMS = ("pytorch", "partc")
HAS_CUDA = "import torch; assert torch.cuda.is_available()"
MEMORY_TARGET = 1.1
WARM_UP_STEPS = 3
PROCESS = Path(__file__).with_name("step_process.py")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class StepProcess:
    """A child that trains one step at a time."""

    def __init__(self, work: str, system: str, folder: Path, device: str = "cpu") -> None:
        self._child = subprocess.Popen(
            [sys.executable, str(PROCESS), work, system, str(folder), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ONE_THREAD,
        )

    def step(self) -> dict[str, float]:
        self.begin()
        return self.reply()

    def begin(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write("step\n")
        self._child.stdin.flush()

    def reply(self) -> dict[str, float]:
        assert self._child.stdout is not None
        reply = self._child.stdout.readline()
        if not reply:
            raise SystemExit(f"a step failed: exit status {self._child.wait()}, see above")
        return json.loads(reply)

    def close(self) -> None:
        self._child.communicate()


def measure(work: str, steps: int, folder: Path, device: str) -> list[Row]:
    prepare = [sys.executable, str(PROCESS), "prepare", work, str(folder), device]
    if not (folder / "plan").exists():
        subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
    children = {system: StepProcess(work, system, folder, device) for system in _systems(device)}
    replies: dict[str, list[dict[str, float]]] = {system: [] for system in children}
    for _ in range(WARM_UP_STEPS + steps):
        for system, child in children.items():
            replies[system].append(child.step())
    for child in children.values():
        child.close()
    return _rows(work, replies)


def _systems(device: str) -> tuple[str, ...]:
    """Return who can be timed on a device."""
    is_missing = (
        device == "gpu" and subprocess.run([sys.executable, "-c", HAS_CUDA], capture_output=True).returncode
    )
    return SYSTEMS[1:] if is_missing else SYSTEMS


def _rows(work: str, replies: dict[str, list[dict[str, float]]]) -> list[Row]:
    times_s = {s: statistics.median(r["s"] for r in those[WARM_UP_STEPS:]) for s, those in replies.items()}
    peaks = {system: those[-1]["peak_bytes"] for system, those in replies.items()}
    return [
        Row(work, system, value, unit, value / values["pytorch"] if "pytorch" in values else None)
        for unit, values in (("s/step", times_s), ("peak bytes", peaks))
        for system, value in values.items()
    ]


def table(rows: list[Row]) -> str:
    lines = ["| work | measure | PyTorch | partc | ratio | target |", "|---|---|---|---|---|---|"]
    found = {(row.work, row.unit, row.system): row for row in rows}
    for ours in (row for row in rows if row.system == "partc"):
        timed = ours.unit == "s/step"
        target = TARGETS[ours.work] if timed else MEMORY_TARGET
        of, scale = ("step, s", 1.0) if timed else ("peak memory, GB", 1e-9)
        theirs = found.get((ours.work, ours.unit, "pytorch"))
        values = " | ".join(f"{row.value * scale:.3f}" if row else "" for row in (theirs, ours))
        ratio = "" if ours.ratio is None else f"{ours.ratio:.2f}x"
        lines.append(f"| {ours.work} | {of} | {values} | {ratio} | {target:.2f}x |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each system, after three others")
    parser.add_argument("--gpu", action="store_true", help="on this machine's first GPU")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plans", type=Path, help="keep partc's plans in this folder, or use those there")
    args = parser.parse_args()
    lack = next(gpu_lacks("gpu0", 0), None) if args.gpu else None
    if lack is not None:
        print(f"Nothing is timed: {lack.what}. To have it: {lack.fix}")
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        for work in args.work:
            folder = (args.plans or Path(temporary)) / work
            folder.mkdir(parents=True, exist_ok=True)
            rows += measure(work, args.steps, folder, "gpu" if args.gpu else "cpu")
    print(table(rows))
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
