"""One system in a process of its own: its step, on request, and its peak memory.

    python step_process.py prepare WORK FOLDER DEVICE    write partc's plan for a cpu or a gpu
    python step_process.py WORK SYSTEM FOLDER DEVICE     then "step" in, a line of JSON out, until the end

The peak (ru_maxrss) is the whole process's: interpreter, libraries, variables, one step.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from sizes import batch_of


def serve(work: str, system: str, folder: Path, device: str) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not mix with replies
    step, batch = _step(work, system, folder, device), batch_of(work)
    for _ in sys.stdin:
        begun_s = time.perf_counter()
        loss = step(batch)
        took_s = time.perf_counter() - begun_s
        peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"s": took_s, "loss": loss, "peak_bytes": peak_bytes}), file=replies, flush=True)


def _step(work: str, system: str, folder: Path, device: str) -> Callable[[Mapping[str, np.ndarray]], float]:
    if system == "pytorch":
        from torch_steps import torch_step

        return torch_step(work, "cuda" if device == "gpu" else "cpu")
    from partc_steps import partc_step

    return partc_step(folder)


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        from partc_steps import prepare_plan

        prepare_plan(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        serve(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
