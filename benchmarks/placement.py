"""Public placement problems: answers, and bounds that hold for every answer.

    python benchmarks/placement.py DIR --json placement.json [--seconds 60] [--only bert24] [--seed 0]

DIR is a copy of the dnn-partitioning collection (https://github.com/msr-fiddle/dnn-partitioning, MIT),
with its folders throughput-inputs and latency-inputs. Per input and kind (contiguous, not contiguous) four
rows: the answer's load, the solver's bound, the certified bound and the seconds; `ratio` is the answer
divided by the bound of the row, and by the better one in the other two. Latency inputs have a makespan,
that of a list scheduler, and twice the seconds. Answers are recomputed from the
input by `partc.cost.placement.problems.load`.
"""

import argparse
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from rows import write_rows

from partc.cost.placement.bounds.certificate import holds
from partc.cost.placement.latency.latency import place_for_latency
from partc.cost.placement.latency.schedule import makespan, schedule_violations
from partc.cost.placement.problems.problem import Problem
from partc.cost.placement.problems.read_problem import read_problem
from partc.cost.placement.throughput.contiguous import place_contiguously
from partc.cost.placement.throughput.free_placement import place_freely
from partc.cost.placement.throughput.solution import Solution, checked_value

Row = dict[str, object]
KINDS = {"contiguous": place_contiguously, "not contiguous": place_freely}


def main() -> None:
    options = _options()
    rows: list[Row] = []
    print(f"{'work':62}{'answer':>12}{'solver':>12}{'certified':>12}{'ratio':>9}{'s':>7}")
    for path in sorted(options.folder.rglob("*.json")):
        if options.only not in str(path.relative_to(options.folder)):
            continue
        for row in solve(path, options):
            rows.append(row)
            write_rows(rows, options.json)
    if options.json is not None:
        print(f"{len(rows)} rows -> {options.json}")


def solve(path: Path, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of one input."""
    problem = read_problem(path)
    measure = path.parts[-3].removesuffix("-inputs")
    if measure == "latency":
        yield from _latency_rows(f"{measure}/{path.parts[-2]}/{path.stem}", problem, options)
        return
    for kind, place in KINDS.items():
        if kind not in options.kinds:
            continue
        solution = place(problem, seconds=options.seconds, seed=options.seed)
        yield from _rows(f"{measure}/{path.parts[-2]}/{path.stem}/{kind}", problem, solution, kind)


def _rows(work: str, problem: Problem, solution: Solution, kind: str) -> Iterator[Row]:
    value = checked_value(problem, solution.placement, contiguous=kind == "contiguous")
    if value is None or value != solution.value:
        raise SystemExit(f"{work}: the answer does not hold")
    if solution.multipliers is not None and not holds(problem, solution.multipliers):
        raise SystemExit(f"{work}: the certificate does not hold")
    bounds = {"solver bound": solution.solver_bound, "certified bound": solution.certified_bound}
    ratio = float(value / max(bounds.values()))
    _print(work, value, bounds, ratio, solution.seconds, solution.certificate)
    yield {"work": work, "system": "partc", "value": float(value), "unit": "load", "ratio": ratio}
    for unit, bound in bounds.items():
        yield {
            "work": work,
            "system": "partc",
            "value": float(bound),
            "unit": unit,
            "ratio": float(value / bound),
        }
    yield {"work": work, "system": "partc", "value": solution.seconds, "unit": "s", "ratio": ratio}


def _print(
    work: str, value: Fraction, bounds: dict[str, Fraction], ratio: float, seconds: float, note: str
) -> None:
    numbers = "".join(f"{float(number):12.5f}" for number in (value, *bounds.values()))
    print(f"{work:62}{numbers}{ratio:9.4f}{seconds:7.1f}  {note}", flush=True)


def _latency_rows(work: str, problem: Problem, options: argparse.Namespace) -> Iterator[Row]:
    solution = place_for_latency(problem, seconds=2 * options.seconds, seed=options.seed)
    schedule = solution.schedule
    if schedule_violations(problem, schedule) or makespan(problem, schedule) != solution.value:
        raise SystemExit(f"{work}: the schedule does not hold")
    bounds = {"solver bound": solution.solver_bound, "certified bound": solution.certified_bound}
    values = {"list scheduler": solution.list_value, **bounds}
    value = solution.value
    ratio = float(value / max(bounds.values()))
    note = f"list scheduler {float(solution.list_value):.5f}, bound: {solution.certificate}"
    _print(work, value, bounds, ratio, solution.seconds, note)
    yield {"work": work, "system": "partc", "value": float(value), "unit": "makespan", "ratio": ratio}
    for unit, other in values.items():
        row = {"work": work, "system": "partc", "value": float(other), "unit": unit}
        yield {**row, "ratio": float(value / other)}
    yield {"work": work, "system": "partc", "value": solution.seconds, "unit": "s", "ratio": ratio}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="inputs whose path contains this")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    return parser.parse_args()


if __name__ == "__main__":
    main()
