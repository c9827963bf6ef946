"""Run damaged files through partc and count what breaks its promises.

python -m tests.fuzz --cases 4000 --seed 0            as `make fuzz`
python -m tests.fuzz --only 0/model/17 --keep found   one case again, its files kept
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.bases import Bases, make_bases
from tests.fuzz.cases import KINDS, describe, draw_case
from tests.fuzz.run_case import Outcome, run_case

SHARES = {
    "model": 6,
    "step": 6,
    "external": 1,
    "artifacts": 2,
    "cluster": 3,
    "strategy": 1,
    "mesh": 2,
    "plan": 4,
    "data": 3,
    "profile": 1,
}


def main() -> int:
    """Run the cases that the command line asks for; return 1 if any broke a promise."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="which kinds of files to damage")
    parser.add_argument("--only", default="", help="one case: SEED/KIND/NUMBER")
    parser.add_argument("--keep", type=Path, help="folder for the files of cases that failed")
    parser.add_argument("--models", type=Path, help="folder with more forward graphs, *.onnx")
    asked = parser.parse_args()
    kinds = asked.kinds.split(",")
    names = [asked.only] if asked.only else list(_names(asked.seed, asked.cases, kinds))
    codes: Counter[tuple[str, int]] = Counter()
    failed, largest_bytes, longest_s, begun_s = 0, 0, 0.0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="partc-fuzz.") as made:
        root = Path(made).resolve()
        (root / "bases").mkdir()
        extra = sorted(asked.models.glob("*.onnx")) if asked.models else []
        bases = make_bases(root / "bases", extra)
        for done, name in enumerate(names, 1):
            outcome = _run(name, bases, root, asked.keep)
            codes[name.split("/")[1], outcome.code] += 1
            failed += bool(outcome.failures)
            largest_bytes = max(largest_bytes, outcome.peak_bytes)
            longest_s = max(longest_s, outcome.seconds)
            if done % 500 == 0:
                print(
                    f"{done}/{len(names)} cases, {failed} failed, {time.monotonic() - begun_s:.0f} s",
                    flush=True,
                )
    for (kind, code), count in sorted(codes.items()):
        print(f"{kind:10} exit code {code:3}: {count}")
    print(f"{len(names)} cases, {failed} failed; at most {largest_bytes / 1e9:.2f} GB and {longest_s:.1f} s")
    return 1 if failed else 0


def _names(seed: int, cases: int, kinds: list[str]) -> Iterator[str]:
    weights = [SHARES[kind] for kind in kinds]
    draw = random.Random(seed)
    for number in range(cases):
        yield f"{seed}/{draw.choices(kinds, weights)[0]}/{number}"


def _run(name: str, bases: Bases, root: Path, keep: Path | None) -> Outcome:
    folder = root / "case"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    case = draw_case(bases, name.split("/")[1], folder, random.Random(name))
    outcome = run_case(case, folder, root / "log")
    for failure in outcome.failures:
        print(f"{name} {describe(case)}: {failure}", flush=True)
    if outcome.failures and keep is not None:
        kept = keep / name.replace("/", "-")
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(folder, kept, symlinks=True)
        (kept / "log").write_text(outcome.told)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
