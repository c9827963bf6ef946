"""Wall times of the compilation's phases, and the garbage collector kept out of them.

Times go to a log beside the result, never into it.

A graph is many objects that all stay: a full collection visits every one and frees none. Collecting while
121,452 nodes are imported takes a quarter of the time (benchmarks/differentiate_large.py, 2026-11-21).
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from partc.runtime.log import log


@dataclass
class Stopwatch:
    """Phase -> seconds, in the order in which they were entered."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what is done inside."""
        begun_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - begun_s
            log.info("%s: %.3f s", name, self.seconds[name])

    def write(self, out: Path) -> Path:
        """Write OUT.log beside the folder OUT, and return its path."""
        path = out.with_name(f"{out.name}.log")
        lines = [f"{name:<24}{seconds:10.3f} s" for name, seconds in self.seconds.items()]
        lines.append(f"{'total':<24}{sum(self.seconds.values()):10.3f} s")
        path.write_text("\n".join(lines) + "\n")
        return path


@contextmanager
def paused_collection() -> Iterator[None]:
    """Collect no cycles meanwhile, where they are collected at all. Works as a decorator, too."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
