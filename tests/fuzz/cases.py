"""One case: a folder with damaged files, the command that reads them, and what it is held to."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import onnx

from partc.runtime.errors import PartcError
from partc.runtime.plan.plan_folder import PLAN_FILE
from partc.runtime.plan.plan_json import encode_plan
from partc.runtime.plan.program import Plan
from tests.fuzz.bases import CLUSTER, Bases
from tests.fuzz.damage import damage_bytes, damage_json, damage_model, damage_npz
from tests.fuzz.mesh_strategies import draw_mesh_strategy

OPTIMIZERS = ("sgd", "momentum", "adam", "adagrad", "adafactor")
EXTERNAL = ("weights.bin", "../secret.bin", "/etc/passwd", "link.bin", "gone.bin", "", "\x00", ".")
NUMBERS = ("0", "8", "-1", "x", str(1 << 62), str(-(1 << 63)))


@dataclass(frozen=True)
class Case:
    """A command of `partc`, to be run in `folder`; a refusal must name `file`.

    `verified`: the plan that it leaves in out/ must train as one device does.
    """

    kind: str
    arguments: tuple[str, ...]
    file: str
    verified: bool = False


def draw_case(bases: Bases, kind: str, folder: Path, draw: random.Random) -> Case:
    """Write the files of a case into `folder`."""
    makers: dict[str, Callable[[Bases, Path, random.Random], Case]] = {
        "model": _model,
        "step": _step,
        "external": _external,
        "artifacts": _artifacts,
        "cluster": _cluster,
        "strategy": _strategy,
        "mesh": _mesh,
        "plan": _plan,
        "profile": _profile,
        "data": _data,
    }
    return makers[kind](bases, folder, draw)


# What `make fuzz` draws; "artifacts" besides, when asked for: the ops of onnxruntime-training have no schema
# that their inputs are held to.
KINDS = ("model", "step", "external", "cluster", "strategy", "mesh", "plan", "data", "profile")


def _model(bases: Bases, folder: Path, draw: random.Random) -> Case:
    base = draw.choice(draw.choice(bases.forwards))
    (folder / "m.onnx").write_bytes(_damaged(base, draw))
    names = [output.name for output in base.graph.output]
    losses = ["total"] if "total" in names else ["softmax_cross_entropy", "mse", *filter(None, names)]
    optimizer = draw.choice(OPTIMIZERS)
    arguments = ("grad", "m.onnx", f"--loss={draw.choice(losses)}", "--optimizer", optimizer, "-o", "t.onnx")
    return Case("model", arguments, "m.onnx")


def _step(bases: Bases, folder: Path, draw: random.Random) -> Case:
    (folder / "m.onnx").write_bytes(_damaged(draw.choice(bases.steps), draw))
    arguments: tuple[str, ...] = ("inspect", "m.onnx")
    if draw.random() < 0.7:
        strategy = draw.choice(("hybrid", "ps", "allreduce"))
        arguments = ("compile", "m.onnx", "-c", str(CLUSTER), "-o", "out", "--strategy", strategy)
    return Case("step", arguments, "m.onnx")


def _damaged(model: onnx.ModelProto, draw: random.Random) -> bytes:
    if draw.random() < 0.1:
        return damage_bytes(model.SerializeToString(), draw)
    return damage_model(model, draw)


def _external(bases: Bases, folder: Path, draw: random.Random) -> Case:
    """Put an initializer's values into a file, and lie about where and how many they are."""
    is_step = draw.random() < 0.5
    model = onnx.ModelProto()
    model.CopyFrom(draw.choice(bases.steps if is_step else draw.choice(bases.forwards)))
    tensors = [t for t in model.graph.initializer if t.data_type != onnx.TensorProto.STRING]
    if tensors:
        tensor = draw.choice(tensors)
        (folder / "weights.bin").write_bytes(onnx.numpy_helper.to_array(tensor).tobytes())
        (folder / "link.bin").symlink_to(CLUSTER)
        for field in ("raw_data", "float_data", "int64_data", "int32_data", "double_data"):
            tensor.ClearField(field)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=draw.choice(EXTERNAL))
        for key in ("offset", "length"):
            if draw.random() < 0.4:
                tensor.external_data.add(key=key, value=draw.choice(NUMBERS))
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    command = ("grad", "m.onnx", "--loss", "mse", "-o", "t.onnx")
    return Case("external", ("inspect", "m.onnx") if is_step else command, "m.onnx")


def _artifacts(bases: Bases, folder: Path, draw: random.Random) -> Case:
    """Damage a file of the folder that onnxruntime-training's generate_artifacts writes."""
    shutil.copytree(draw.choice(bases.artifacts), folder / "a")
    file = folder / "a" / draw.choice(("training_model.onnx", "optimizer_model.onnx", "checkpoint"))
    if file.suffix:
        file.write_bytes(_damaged(onnx.load(file), draw))
    else:
        file.write_bytes(damage_bytes(file.read_bytes(), draw))
    return Case("artifacts", ("inspect", "a"), "a")


# However many workers a damaged cluster has: else the model would be refused, and rightly so.
READ_ALIKE = ("--batch", "per-replica")


def _cluster(bases: Bases, folder: Path, draw: random.Random) -> Case:
    base = draw.choice(bases.clusters).read_bytes()
    (folder / "c.json").write_bytes(damage_json(base, draw))
    if draw.random() < 0.5:
        plan = draw.choice(bases.plans)
        return Case("cluster", ("simulate", str(plan), "-c", "c.json"), "c.json")
    step = bases.folder / draw.choice(("sgd.onnx", "table.onnx"))
    strategy = draw.choice(("hybrid", "ps", "allreduce"))
    arguments = ("compile", str(step), "-c", "c.json", "-o", "out", "--strategy", strategy)
    return Case("cluster", (*arguments, *READ_ALIKE), "c.json")


def _strategy(bases: Bases, folder: Path, draw: random.Random) -> Case:
    name, path = draw.choice(bases.strategies)
    (folder / "s.json").write_bytes(damage_json(path.read_bytes(), draw))
    arguments = ("compile", str(bases.folder / f"{name}.onnx"), "-c", str(CLUSTER), "-o", "out")
    return Case("strategy", (*arguments, "--strategy", "s.json", *READ_ALIKE), "s.json")


def _profile(bases: Bases, folder: Path, draw: random.Random) -> Case:
    name, path = draw.choice(bases.profiles)
    (folder / "p.json").write_bytes(damage_json(path.read_bytes(), draw))
    step = str(bases.folder / f"{name}.onnx")
    if draw.random() < 0.2:
        return Case(
            "profile", ("profile", step, "-c", str(CLUSTER), "--budget", "0.1s", "-o", "p.json"), "p.json"
        )
    arguments = ("compile", step, "-c", str(CLUSTER), "-o", "out", "--profile", "p.json")
    return Case("profile", (*arguments, *READ_ALIKE), "p.json")


def _mesh(bases: Bases, folder: Path, draw: random.Random) -> Case:
    """Split what a step has, or now and then what another has; what compiles is verified."""
    of = draw.choice(bases.meshes)
    (folder / "s.json").write_bytes(draw_mesh_strategy(of, draw))
    step = of.step if draw.random() < 0.9 else draw.choice(bases.meshes).step
    arguments = ("compile", str(bases.folder / f"{step}.onnx"), "-c", str(CLUSTER), "-o", "out")
    said = READ_ALIKE if step == "table" else ()  # two samples are too few for four
    return Case("mesh", (*arguments, "--strategy", "s.json", *said), "s.json", verified=True)


def _plan(bases: Bases, folder: Path, draw: random.Random) -> Case:
    """Damage a plan; mostly its hash is made right again, as of an edit that the user accepted."""
    shutil.copytree(draw.choice(bases.plans), folder / "p")
    file = folder / "p" / PLAN_FILE
    damaged = damage_json(file.read_bytes(), draw)
    if draw.random() < 0.8:
        damaged = _with_right_hash(damaged)
    file.write_bytes(damaged)
    command = draw.choice((("simulate", "p"), ("train", "p"), ("train", "p"), ("seal", "p")))
    return Case("plan", command, "p")


def _with_right_hash(text: bytes) -> bytes:
    try:
        return encode_plan(msgspec.json.decode(text, type=Plan))
    except (msgspec.MsgspecError, PartcError, UnicodeError, OverflowError):
        return text


def _data(bases: Bases, folder: Path, draw: random.Random) -> Case:
    plan, path = draw.choice(bases.data)
    (folder / "d.npz").write_bytes(damage_npz(path.read_bytes(), draw))
    train = bases.folder / f"{plan.split('.')[0]}.onnx"
    match draw.randrange(4):
        case 0:
            return Case("data", ("inspect", str(train), "--initial", "d.npz"), "d.npz")
        case 1:
            return Case("data", ("inspect", str(train), "--sample-data", "d.npz"), "d.npz")
        case _:
            return Case("data", ("train", str(bases.folder / plan), "d.npz"), "d.npz")


def describe(case: Case) -> str:
    """Return a case in one line."""
    return json.dumps(case.arguments)
