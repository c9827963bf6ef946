"""Did a change of the compiler change any plan? Compiles some sixty small ones and hashes every file.

    python benchmarks/plan_hashes.py OUT.json                about a minute
    python benchmarks/plan_hashes.py --diff A.json B.json    what differs; exit code 1 if anything does

run.log is left out, for it holds wall times. A command that fails counts with what it says.
"""

import contextlib
import hashlib
import io
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx

from partc.compiler.commands.cli import main as partc

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures"
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
CPU = "cpu-core"

TRANSFORMER = """
<ir_version: 10, opset_import: ["" : 21]>
forward (int64[B,8] ids) => (float[B,5] logits)
<float[32,16] words, float[8,16] positions, float[16] g1, float[16] b1, float[16,16] Wq, float[16,16] Wk,
 float[16,16] Wv, float[16,16] Wo, float[16] bo, float[16] g2, float[16] b2, float[16,32] W1, float[32] c1,
 float[32,16] W2, float[16] c2, float[16,5] Wp, float[5] bp> {
    heads = Constant <value = int64[4] {0, 8, 2, 8}> ()
    flat = Constant <value = int64[3] {0, 8, 16}> ()
    last = Constant <value = int64[1] {1}> ()
    scale = Constant <value = float {0.35355}> ()
    e = Gather (words, ids)
    x = Add (e, positions)
    n1 = LayerNormalization <axis = -1> (x, g1, b1)
    q0 = MatMul (n1, Wq)
    k0 = MatMul (n1, Wk)
    v0 = MatMul (n1, Wv)
    q1 = Reshape (q0, heads)
    k1 = Reshape (k0, heads)
    v1 = Reshape (v0, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k = Transpose <perm = [0, 2, 3, 1]> (k1)
    v = Transpose <perm = [0, 2, 1, 3]> (v1)
    qk = MatMul (q, k)
    scores = Mul (qk, scale)
    p = Softmax <axis = -1> (scores)
    o0 = MatMul (p, v)
    o1 = Transpose <perm = [0, 2, 1, 3]> (o0)
    o2 = Reshape (o1, flat)
    o3 = MatMul (o2, Wo)
    o = Add (o3, bo)
    y = Add (x, o)
    n2 = LayerNormalization <axis = -1> (y, g2, b2)
    h0 = MatMul (n2, W1)
    h1 = Add (h0, c1)
    h = Gelu (h1)
    f0 = MatMul (h, W2)
    f = Add (f0, c2)
    z = Add (y, f)
    pooled = ReduceMean <keepdims = 0> (z, last)
    l = MatMul (pooled, Wp)
    logits = Add (l, bp)
}
"""

FOREIGN = """
<ir_version: 10, opset_import: ["" : 21]>
step (float[8,4] x, int64[8] ids, float[20,4] E, float[4] W, int64 count)
  => (float loss, float[20,4] E_next, float[4] W_next, int64 count_next)
<float lr = {0.5}, int64 one = {1}, float eighth = {0.125}> {
    e = Gather (E, ids)
    z = Mul (x, e)
    y = Mul (z, W)
    axis = Constant <value = int64[1] {1}> ()
    each = ReduceSum <keepdims = 0> (y, axis)
    loss = ReduceMean <keepdims = 0> (each)
    zero = Constant <value = int64[1] {0}> ()
    dW0 = ReduceSum <keepdims = 0> (z, zero)
    dW = Mul (dW0, eighth)
    dE0 = Mul (x, W)
    dE1 = Mul (dE0, eighth)
    column = Unsqueeze (ids, axis)
    size = Constant <value = int64[2] {20, 4}> ()
    zeros = ConstantOfShape (size)
    dE = ScatterND <reduction = "add"> (zeros, column, dE1)
    partE = Mul (lr, dE)
    E_next = Sub (E, partE)
    part = Mul (lr, dW)
    W_next = Sub (W, part)
    count_next = Add (count, one)
}
"""

# name -> the devices' profiles by host, bytes a second and seconds of latency of each host's link
CLUSTERS: dict[str, tuple[list[list[str]], float, float]] = {
    "c1x1": ([[CPU]], 125e6, 25e-6),
    "c2x2": ([[CPU] * 2] * 2, 125e6, 25e-6),
    "c1x3": ([[CPU] * 3], 125e6, 25e-6),
    "c3x1": ([[CPU]] * 3, 125e6, 25e-6),
    "gpus": ([["titan-xp"] * 2] * 2, 125e6, 25e-6),
    "mixed": ([["titan-xp", "v100"], ["k80", "h100"], ["p100"]], 1.25e9, 5e-6),
    "c8x8": ([["titan-xp"] * 8] * 8, 12.5e9, 2e-6),
}
STRATEGIES: dict[str, dict[str, object]] = {
    "open_global": {"batch": "global", "parameters": {}},
    "foreign_user": {
        "batch": "per-replica",
        "parameters": {
            "E": {
                "method": "servers",
                "shards": [
                    {"host": "host0", "start": 0, "stop": 7},
                    {"host": "host1", "start": 7, "stop": 20},
                ],
            },
            "W": {"method": "all_reduce"},
        },
    },
}
FOREIGN_IS = "--initial foreign.npz --state E=E_next,W=W_next,count=count_next --loss loss"

# partc model ... -o NAME.forward.onnx
MODELS = """
mlp: mlp --set sizes=6,8,3 --set batch=12
lm: lm --set vocab=500 --set embedding=8 --set cells=16 --set projection=8 --set steps=3 --set samples=32 --set batch=12
nmt: nmt --set source_vocab=200 --set target_vocab=160 --set embedding=8 --set cells=8 --set source_steps=4 \
    --set target_steps=4 --set batch=12
resnet50: resnet50 --set width=4 --set image=32 --set classes=10 --set batch=8
"""  # noqa: E501

# partc grad FORWARD.forward.onnx ... -o NAME.onnx
STEPS = """
mlp: mlp --loss softmax_cross_entropy
mlp-momentum: mlp --loss softmax_cross_entropy --optimizer momentum --clip-global-norm 1 \
    --schedule cosine:steps=50,floor=0.1 --warmup 5
mlp-adamw: mlp --loss softmax_cross_entropy --optimizer adamw --weight-decay 0.01 --no-decay *bias* --ema 0.9
mlp-lamb: mlp --loss softmax_cross_entropy --optimizer lamb --accumulate 2
mlp-scaled: mlp --loss softmax_cross_entropy --optimizer adafactor --clip-norm 1 --lr fed
mlp-info: mlp --loss softmax_cross_entropy --optimizer momentum --format training-info
lm-adagrad: lm --loss loss --optimizer adagrad
lm-clipped: lm --loss loss --optimizer adagrad --clip-global-norm 5
lm-adam: lm --loss loss --optimizer adam --set-optimizer lazy=true
nmt-sgd: nmt --loss loss
nmt-adam: nmt --loss loss --optimizer adam --clip-value 1
resnet50-momentum: resnet50 --loss softmax_cross_entropy --optimizer momentum
transformer-adamw: transformer --loss softmax_cross_entropy --optimizer adamw --batch-size 8
transformer-dynamic: transformer --loss softmax_cross_entropy --optimizer rmsprop --clip-global-norm 1
shufflenet: shufflenet --loss softmax_cross_entropy --batch-size 4 --reinit
squeezenet: squeezenet --loss softmax_cross_entropy --batch-size 4 --reinit --optimizer nesterov
"""

# partc compile STEP -c CLUSTER ...
PLANS = f"""
mlp.onnx c1x1
mlp.onnx c2x2
mlp.onnx c1x3
mlp.onnx c1x3 --asynchronous --batch per-replica
mlp-momentum.onnx c2x2 --strategy auto --batch global
mlp-momentum.onnx c2x2 --strategy hybrid --batch global
mlp-momentum.onnx c2x2 --strategy allreduce --batch global
mlp-momentum.onnx c2x2 --strategy ps --batch global
mlp-momentum.onnx c2x2 --strategy open_global.json
mlp-momentum.onnx c2x2 --recompute 1008
mlp-momentum.onnx c2x2 --decisions-only --batch global
mlp-momentum.onnx c2x2 --fetch-gradients layer0.weight,layer1.bias --batch global
mlp-adamw.onnx c1x3 --batch global
mlp-adamw.onnx mixed
mlp-adamw.onnx c8x8 --batch per-replica
mlp-lamb.onnx c2x2
mlp-scaled.onnx c2x2 --strategy allreduce
mlp-info.onnx c2x2 --strategy ps
lm-adagrad.onnx c1x1
lm-adagrad.onnx c2x2 --strategy auto
lm-adagrad.onnx c2x2 --strategy hybrid
lm-adagrad.onnx c2x2 --strategy allreduce
lm-adagrad.onnx c2x2 --strategy ps
lm-adagrad.onnx c2x2 --strategy hybrid --without boundary-ops
lm-adagrad.onnx c2x2 --search-partitions model --strategy ps
lm-adagrad.onnx c2x2 --min-partitions 2 --search-partitions off --strategy hybrid
lm-adagrad.onnx c2x2 --asynchronous --batch per-replica
lm-adagrad.onnx c2x2 --decisions-only
lm-adagrad.onnx c2x2 --sum-sparse --batch per-replica
lm-adagrad.onnx gpus --asynchronous --batch per-replica --strategy ps
lm-adagrad.onnx mixed
lm-adagrad.onnx c8x8 --strategy hybrid
lm-clipped.onnx c3x1 --strategy hybrid --batch global
lm-clipped.onnx c3x1 --strategy ps --batch global
lm-clipped.onnx gpus --strategy hybrid
lm-clipped.onnx gpus --strategy ps
lm-adam.onnx c2x2 --strategy hybrid
lm-adam.onnx c2x2 --strategy ps --without local-aggregation --without post-aggregation
nmt-sgd.onnx c2x2
nmt-sgd.onnx c1x3 --recompute 1MB --strategy allreduce --batch per-replica
nmt-adam.onnx c2x2 --strategy hybrid --batch global
nmt-adam.onnx c2x2 --strategy ps --batch global
resnet50-momentum.onnx c2x2 --batch per-replica
resnet50-momentum.onnx c1x3 --strategy hybrid --batch per-replica --recompute 1MB
resnet50-momentum.onnx c2x2 --batch global --strategy allreduce
transformer-adamw.onnx c2x2 --batch per-replica
transformer-adamw.onnx c2x2 --batch global
transformer-adamw.onnx c2x2 --asynchronous --batch per-replica
transformer-adamw.onnx c1x3 --strategy ps --recompute 80000
transformer-adamw.onnx c2x2 --strategy fsdp --batch global
transformer-adamw.onnx c1x3 --strategy fsdp --batch per-replica
transformer-adamw.onnx c2x2 --strategy fsdp=2,tensor=2 --batch global
transformer-adamw.onnx c2x2 --strategy fsdp=2,pipeline=2,microbatches=2 --batch global
transformer-adamw.onnx c2x2 --strategy tensor=4 --batch global
transformer-adamw.onnx c2x2 --strategy data=2,tensor=2 --batch per-replica
transformer-adamw.onnx c2x2 --strategy data=2,pipeline=2,microbatches=2 --batch global
mlp-momentum.onnx c2x2 --strategy one-weird-trick --batch global
lm-adagrad.onnx c2x2 --strategy tensor=2,data=2
resnet50-momentum.onnx c2x2 --strategy data=2,spatial=2 --batch global
transformer-dynamic.onnx c2x2 --size B=8
transformer-dynamic.onnx gpus --strategy hybrid --size B=8 --batch global
shufflenet.onnx c2x2 --strategy allreduce
squeezenet.onnx c1x3 --strategy hybrid
foreign.onnx c2x2 {FOREIGN_IS}
foreign.onnx c2x2 {FOREIGN_IS} --batch global --strategy ps
foreign.onnx c2x2 {FOREIGN_IS} --strategy foreign_user.json
jax_step.onnx c2x2
pytorch_step_float32.onnx c2x2
pytorch_step_float64.onnx c1x3 --strategy hybrid --batch per-replica
ort_training/cnn c2x2 --strategy hybrid
ort_training/embedding c2x2 --strategy hybrid
ort_training/transformer c2x2 --strategy hybrid
"""

Hashes = dict[str, dict[str, str]]


def hash_plans() -> Hashes:
    """Return command -> the SHA-256 of every file that it writes, or what it says where it fails."""
    found: Hashes = {}
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        _write_inputs()
        for made, command in _named(MODELS):
            found |= _hashed(f"model {command}", Path(f"{made}.forward.onnx"))
        for made, command in _named(STEPS):
            forward, options = command.split(" ", 1)
            found |= _hashed(f"grad {forward}.forward.onnx {options}", Path(f"{made}.onnx"))
        for number, line in enumerate(PLANS.split("\n")[1:-1]):
            step, cluster, *options = line.split(" ")
            command = f"compile {step} -c {cluster}.json {' '.join(options)}"
            found |= _hashed(command.rstrip(), Path(f"plan{number}"))
    return found


def _hashed(command: str, made: Path) -> Hashes:
    complaint = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(complaint):
        code = partc([*command.split(" "), "-o", str(made)])
    if code:
        return {command: {f"exit code {code}": complaint.getvalue()}}
    files = [path for path in sorted(made.rglob("*")) if path.is_file()] if made.is_dir() else [made]
    hashes = {str(path): path.read_bytes() for path in files if path.name != "run.log"}
    return {command: {path: hashlib.sha256(content).hexdigest() for path, content in hashes.items()}}


def _named(table: str) -> list[tuple[str, str]]:
    lines = (line.partition(": ") for line in table.strip().split("\n"))
    return [(name, " ".join(command.split())) for name, _, command in lines]


# ---------------------------------------------------------------- what is compiled


def _write_inputs() -> None:
    for name, (hosts, bytes_per_s, latency_s) in CLUSTERS.items():
        Path(f"{name}.json").write_text(json.dumps(_cluster(name, hosts, bytes_per_s, latency_s)))
    for name, strategy in STRATEGIES.items():
        Path(f"{name}.json").write_text(json.dumps({"format": "partc-strategy/1", **strategy}))
    rng = np.random.default_rng(0)
    onnx.save(_with_values(onnx.parser.parse_model(TRANSFORMER), rng), "transformer.forward.onnx")
    onnx.save(onnx.parser.parse_model(FOREIGN), "foreign.onnx")
    values = {"E": (20, 4), "W": (4,)}
    drawn = {name: rng.normal(size=shape).astype(np.float32) for name, shape in values.items()}
    np.savez("foreign.npz", **drawn, count=np.int64(0))
    for name in ("shufflenet", "squeezenet"):
        shutil.copy(LIGHT / f"light_{name}.onnx", f"{name}.forward.onnx")
    for step in ("jax_step", "pytorch_step_float32", "pytorch_step_float64"):
        for path in FIXTURES.glob(f"{step}.*"):
            shutil.copy(path, path.name)
    shutil.copytree(FIXTURES / "ort_training", "ort_training")


def _cluster(name: str, hosts: list[list[str]], bytes_per_s: float, latency_s: float) -> dict[str, object]:
    def device(host: int, number: int, profile: str) -> dict[str, object]:
        kind = "cpu" if profile == CPU else "gpu"
        where = {"threads": 1} if kind == "cpu" else {"index": number}
        return {"name": f"host{host}/{kind}{number}", "kind": kind, "profile": profile, **where}

    listed = [
        {
            "name": f"host{host}",
            "memory_bytes": 2**36,
            "devices": [device(host, number, profile) for number, profile in enumerate(profiles)],
        }
        for host, profiles in enumerate(hosts)
    ]
    rates = {"bytes_per_s": bytes_per_s, "latency_s": latency_s}
    links = [{"ends": [f"host{host}", "switch"], **rates} for host in range(len(hosts))]
    made: dict[str, object] = {"format": "partc-cluster/1", "name": name, "hosts": listed}
    return made | ({"switches": ["switch"], "links": links} if len(hosts) > 1 else {})


def _with_values(model: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """Draw values for the parameters, which the text declares without any."""
    for declared in model.graph.value_info:
        shape = [size.dim_value for size in declared.type.tensor_type.shape.dim]
        values = (0.1 * rng.normal(size=shape)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, declared.name))
    del model.graph.value_info[:]
    return model


def differing(one: Hashes, other: Hashes) -> list[str]:
    """Return a line for every command whose files are not the same."""
    lines = []
    for command in sorted({*one, *other}):
        here, there = one.get(command, {}), other.get(command, {})
        if files := [file for file in sorted({*here, *there}) if here.get(file) != there.get(file)]:
            lines.append(f"{command}: {', '.join(files[:8])}")
    return lines


def main() -> int:
    if sys.argv[1] == "--diff":
        one, other = (json.loads(Path(path).read_text()) for path in sys.argv[2:4])
        lines = differing(one, other)
        print(*lines, f"{len(lines)} of {len({*one, *other})} differ", sep="\n")
        return 1 if lines else 0
    out = Path(sys.argv[1]).absolute()
    found = hash_plans()
    out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} commands, {sum(map(len, found.values()))} files -> {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
