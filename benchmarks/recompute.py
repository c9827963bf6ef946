"""Step time and peak memory of plans that compute values again, beside the plan that does not.

    python benchmarks/recompute.py [--work resnet50 gpt2] [--shares 0.75 0.5] [--steps 5] [--json FILE]

Shares are of what the plan's values take at once. Every plan has a process of its own, one thread; their
steps take turns. Needs partc with its `peers` extra for gpt2, whose forward graph PyTorch exports.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from partc_steps import compile_for_one_device
from rows import Row, write_rows
from single_device import PROCESS, WARM_UP_STEPS, StepProcess

from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Recomputed

EVERYTHING = 10**15


def measure(work: str, shares: list[float], steps: int, folder: Path) -> list[Row]:
    subprocess.run([sys.executable, str(PROCESS), "prepare", work, str(folder)], check=True, stdout=2)
    train = folder / "train.onnx"
    told = {1.0: _compile(train, folder / "1.0", EVERYTHING)}
    for share in shares:
        told[share] = _compile(train, folder / str(share), int(share * told[1.0].before_bytes))
    children = {share: StepProcess(work, "partc", folder / str(share)) for share in told}
    replies = {share: [child.step() for _ in range(WARM_UP_STEPS)] for share, child in children.items()}
    for _ in range(steps):
        for share, child in children.items():
            replies[share].append(child.step())
    for child in children.values():
        child.close()
    times_s = {
        share: statistics.median(r["s"] for r in found[WARM_UP_STEPS:]) for share, found in replies.items()
    }
    peaks = {share: found[-1]["peak_bytes"] for share, found in replies.items()}
    for share, again in told.items():
        print(
            f"| {work} | {again.after_bytes / 1e6:,.0f} | {again.values} | {again.flops / 1e9:.1f} "
            f"| {peaks[share] / 1e9:.2f} | {times_s[share]:.2f} | {times_s[share] / times_s[1.0]:.2f}x |",
            flush=True,
        )
    return [
        Row(work, f"values at {share:.0%}", values[share], unit, values[share] / values[1.0])
        for unit, values in (("s/step", times_s), ("peak bytes", peaks))
        for share in told
    ]


def _compile(train: Path, folder: Path, limit_bytes: int) -> Recomputed:
    compile_for_one_device(train, folder / "plan", recompute_bytes=limit_bytes)
    told = read_plan_folder(folder / "plan").plan.recomputed
    assert told is not None
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", nargs="+", choices=("resnet50", "gpt2"), default=("resnet50", "gpt2"))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.75, 0.5])
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each plan, after three others")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    rows: list[Row] = []
    print("| work | values at once, MB | computed again | GFLOP more | peak memory, GB | step, s | ratio |")
    print("|---|---|---|---|---|---|---|")
    for work in args.work:
        with tempfile.TemporaryDirectory() as temporary:
            rows += measure(work, args.shares, args.steps, Path(temporary))
    write_rows(rows, args.json)


if __name__ == "__main__":
    main()
