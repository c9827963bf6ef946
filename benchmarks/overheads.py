"""What segments and a second rank cost: steps of the same work in one run, without anybody else's in between.

    python benchmarks/overheads.py [--works lm gpt2 resnet50] [--rounds 5] [--json FILE]

    session    the training graph in one ONNX Runtime session; what it makes of variables the next step reads
    one rank   partc's plan for one device
    segments   a rank of partc's plan for two, whose communications end at once: what its segments take alone
    beside     the plan for one device, twice, in two processes at the same time
    two ranks  the plan for two, on two cores of this machine

Ratios: one rank and segments to session, two ranks to beside. Needs partc with its `peers` extra.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
from data_parallel import compile_for, train_partc, two_ranks
from partc_steps import compile_for_one_device, partc_step, write_training_step
from rows import Row, write_rows
from single_device import StepProcess
from sizes import WORKS, batch_of_replica

from partc.runtime.data.initial import InitialValues
from partc.runtime.execution.device import Sessions, device_of
from partc.runtime.execution.environment import Environment
from partc.runtime.execution.executor import Executor
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Run
from partc.runtime.transports.communication import Part

WARM_UP = 2
COMPARED = {"one rank": "session", "segments": "session", "two ranks": "beside"}
Batch = Mapping[str, np.ndarray]
Step = Callable[[Batch], None]


class Silence:
    """A transport on which a rank meets nobody: sums are its own values, rows its own rows."""

    def start(self, part: Part) -> "Silence.Ended":
        """End a communication as it begins."""
        return Silence.Ended(part)

    def progress(self) -> None:
        """Move nothing."""

    def beside(self) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    @dataclass(frozen=True)
    class Ended:
        part: Part

        def done(self) -> bool:
            """Tell that it is over."""
            return True

        def rows(self) -> tuple[np.ndarray, ...]:
            """Return the rank's own rows as everybody's."""
            assert self.part.start.kind == "all_gather_rows"
            members = len(self.part.members)
            lengths = np.full(members, len(self.part.rows[0]))
            return (*(np.concatenate([rows] * members) for rows in self.part.rows), lengths)


def main() -> None:
    """Measure every work, and print a line of each."""
    options = _options()
    rows: list[Row] = []
    for work in options.works:
        with tempfile.TemporaryDirectory() as made:
            took_s = _measure(work, Path(made), options.rounds)
        for system, step_s in took_s.items():
            to = COMPARED.get(system)
            rows.append(Row(work, system, step_s, "s/step", step_s / took_s[to] if to else None))
            print(f"{work:9} {system:10} {step_s:7.3f} s", f"{rows[-1].ratio:.3f}x" if to else "", flush=True)
    write_rows(rows, options.json)


def _measure(work: str, folder: Path, rounds: int) -> dict[str, float]:
    train = write_training_step(work, folder)
    compile_for_one_device(train, folder / "plan")
    compile_for(work, train, two_ranks(), folder / "two")
    took_s: dict[str, list[float]] = {}
    steps: dict[str, Step] = {
        "session": _session_step(train, folder / "plan"),
        "one rank": partc_step(folder),
        "segments": _silent_step(folder / "two"),
    }
    for number in range(WARM_UP + 2 * rounds):
        for system, step in steps.items():
            begun_s = time.perf_counter()
            step(batch_of_replica(work, number, 0))
            if number >= WARM_UP:
                took_s.setdefault(system, []).append(time.perf_counter() - begun_s)
    del steps
    took_s |= {"beside": [], "two ranks": []}
    for _ in range(rounds):
        took_s["beside"] += _side_by_side(work, folder)
        took_s["two ranks"] += [line.s for line in train_partc(work, folder / "two", 2, WARM_UP + 4)][
            WARM_UP:
        ]
    return {system: statistics.median(each) for system, each in took_s.items()}


def _session_step(train: Path, plan: Path) -> Step:
    """Return a step of the graph as it is: variables are replaced by what the step returns."""
    folder = read_plan_folder(plan)
    first = InitialValues(folder, None)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(train, options, providers=["CPUExecutionProvider"])
    metadata = session.get_modelmeta().custom_metadata_map
    next_of: dict[str, str] = json.loads(metadata["partc.training"])["state"]
    values = {name: ort.OrtValue.ortvalue_from_numpy(first.part(name)) for name in next_of}
    others = [output.name for output in session.get_outputs() if output.name not in next_of.values()]

    def step(batch: Batch) -> None:
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name, array in batch.items():
            binding.bind_cpu_input(name, array)
        for name in (*next_of.values(), *others):
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        values.update(zip(next_of, binding.get_outputs(), strict=False))

    return step


def _silent_step(plan: Path) -> Step:
    folder = read_plan_folder(plan)
    rank = folder.plan.ranks[0]
    environment = Environment(folder.plan, rank, device_of(rank), InitialValues(folder, None))
    executor = Executor(folder.plan, rank, environment, Sessions(folder), Silence())
    runs = sum(isinstance(instruction, Run) for instruction in folder.plan.instructions)
    print(f"{runs} segments in the plan for two", flush=True)

    def step(batch: Batch) -> None:
        for _ in executor.step(batch):
            raise AssertionError("nothing is waited for")

    return step


def _side_by_side(work: str, folder: Path) -> list[float]:
    both = [StepProcess(work, "partc", folder) for _ in range(2)]
    took_s = []
    for number in range(WARM_UP + 4):
        for process in both:
            process.begin()
        replies = [process.reply() for process in both]
        if number >= WARM_UP:
            took_s.append(max(reply["s"] for reply in replies))
    for process in both:
        process.close()
    return took_s


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=["lm", "gpt2", "resnet50"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
