"""One host sees another plan, segment or model than the others, or has another partc: refused before step 1.

The host's Python, as the cluster file may name one, is a program that mounts what only this host is to see.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from partc.runtime.plan.plan_folder import PLAN_FILE, read_plan_folder, seal_plan_folder
from partc.runtime.plan.plan_json import encode_plan
from tests.chaos.slow_network import HOSTS, NETWORK, hosts, session_hosts
from tests.chaos.stage import Stage
from tests.chaos.training import Outcome, Training

_CLUSTER_FILE = "cluster.json"
_OVER_S = 30.0


def refuse(way: str, is_asynchronous: bool, stage: Stage, draw: random.Random) -> Outcome:
    """Let one host differ from the others; the job is to end before its first step, and name it."""
    make = session_hosts if is_asynchronous else hosts
    with make(stage) as bench, Training(bench.plan, stage.case_folder()) as training:
        number = draw.randint(1, HOSTS)
        setup, told = WAYS[way](training.plan, training.root, draw)
        _set_python(training.plan, training.root / "python", number, setup)
        begun_s = time.monotonic()
        training.begin(1_000)
        failures = training.end(2, _OVER_S)
        told_s = time.monotonic() - begun_s
        failures += training.left()
        said = training.told
        is_named = (
            f"'h{number}'" in said or NETWORK.host(number) in said
        )  # who cannot read a plan has no other
        failures += [] if told in said and is_named else [f"host h{number} was not named"]
        failures += ["it began"] if training.step else []
        failures += [said[-800:]] if failures else []
        return Outcome(f"h{number}", "asynchronous" if is_asynchronous else "", told_s, tuple(failures))


Way = Callable[[Path, Path, random.Random], tuple[str, str]]


def _other_plan(plan: Path, root: Path, draw: random.Random) -> tuple[str, str]:
    """Return a plan that is whole and sealed, and predicts another time."""
    other = msgspec.structs.replace(read_plan_folder(plan).plan, predicted_step_s=draw.random())
    return _instead(plan / PLAN_FILE, encode_plan(other), root), "plan.json is not that of host"


def _edited_plan(plan: Path, root: Path, draw: random.Random) -> tuple[str, str]:
    other = json.loads((plan / PLAN_FILE).read_text()) | {"predicted_step_s": draw.random()}
    return _instead(plan / PLAN_FILE, json.dumps(other).encode(), root), "the plan was changed"


def _other_segment(plan: Path, root: Path, draw: random.Random) -> tuple[str, str]:
    segment = draw.choice(sorted((plan / "segments").iterdir()))
    return _instead(segment, _with_a_flip(segment, draw), root), "was changed: SHA-256"


def _other_model(plan: Path, root: Path, draw: random.Random) -> tuple[str, str]:
    model = plan / read_plan_folder(plan).plan.model
    return _instead(model, _with_a_flip(model, draw), root), str(model)


def _other_version(plan: Path, root: Path, draw: random.Random) -> tuple[str, str]:
    metadata = root / "installed" / "partc-9.9.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Name: partc\nVersion: 9.9\n")
    return f"export PYTHONPATH={metadata.parent}:$PYTHONPATH", "partc is "


WAYS: dict[str, Way] = {
    "another plan": _other_plan,
    "an edited plan": _edited_plan,
    "another segment": _other_segment,
    "another model": _other_model,
    "another version of partc": _other_version,
}


def _instead(path: Path, content: bytes, root: Path) -> str:
    """Return what lets a host see a file of this content in another's place."""
    other = root / "other"
    other.write_bytes(content)
    return f"mount --bind {other} {path}"


def _with_a_flip(path: Path, draw: random.Random) -> bytes:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


def _set_python(plan: Path, python: Path, number: int, setup: str) -> None:
    python.write_text(f'#!/bin/sh\n{setup}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    cluster = json.loads((plan / _CLUSTER_FILE).read_text())
    cluster["hosts"][number - 1]["python"] = str(python)
    (plan / _CLUSTER_FILE).write_text(json.dumps(cluster))
    seal_plan_folder(plan)
