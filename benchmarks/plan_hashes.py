"""Did a change of the compiler change any plan? Compiles some sixty small ones and hashes every file.

    python benchmarks/plan_hashes.py CHECKOUT OUT.json       about a minute, with the checkout's own .venv
    python benchmarks/plan_hashes.py --diff A.json B.json    what differs; exit code 1 if anything does

run.log is left out, for it holds wall times. A command that fails counts with its exit code and first line.
"""

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

LOGS = {"run.log"}


# ---------------------------------------------------------------- inputs


def cluster(name, hosts, servers=(), link=(125e6, 25e-6)):
    """hosts: for every host its devices' profiles."""

    def device(h, d, profile):
        kind = "cpu" if profile == "cpu-core" else "gpu"
        extra = {"threads": 1} if kind == "cpu" else {"index": d}
        return {"name": f"host{h}/{kind}{d}", "kind": kind, "profile": profile, **extra}

    listed = [
        {
            "name": f"host{h}",
            "address": "localhost",
            "memory_bytes": 2**36,
            "memory_bytes_per_s": 25e9,
            "devices": [device(h, d, p) for d, p in enumerate(profiles)],
            **({"server": True} if h in servers else {}),
        }
        for h, profiles in enumerate(hosts)
    ]
    links = [
        {"ends": [host["name"], "switch"], "bytes_per_s": link[0], "latency_s": link[1]} for host in listed
    ]
    made = {
        "format": "partc-cluster/1",
        "name": name,
        "hosts": listed,
        "switches": ["switch"],
        "links": links,
    }
    Path(f"{name}.json").write_text(json.dumps(made))


CPU = "cpu-core"


def write_clusters():
    cluster("c1x1", [[CPU]])
    cluster("c2x2", [[CPU] * 2] * 2)
    cluster("c1x3", [[CPU] * 3])
    cluster("c3x1", [[CPU]] * 3)
    cluster("gpus", [["titan-xp"] * 2] * 2)
    cluster("mixed", [["titan-xp", "v100"], ["k80", "h100"], ["p100"]], link=(1.25e9, 5e-6))
    cluster("c8x8", [["titan-xp"] * 8] * 8, link=(12.5e9, 2e-6))


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


def parameters_for(model, seed=0):
    import numpy as np
    import onnx
    from onnx import numpy_helper

    rng = np.random.default_rng(seed)
    inits = list(model.graph.initializer)
    del model.graph.initializer[:]
    declared = {v.name: v for v in model.graph.value_info}
    for value in declared.values():
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        array = (rng.normal(size=shape) * 0.1).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, value.name))
    model.graph.initializer.extend(inits)
    del model.graph.value_info[:]
    onnx.checker.check_model(model)
    return model


def write_texts():
    import numpy as np
    import onnx

    onnx.save(parameters_for(onnx.parser.parse_model(TRANSFORMER)), "transformer.forward.onnx")
    onnx.save(onnx.parser.parse_model(FOREIGN), "foreign.onnx")
    rng = np.random.default_rng(1)
    np.savez(
        "foreign.npz",
        E=rng.normal(size=(20, 4)).astype(np.float32),
        W=rng.normal(size=4).astype(np.float32),
        count=np.int64(0),
    )
    light = Path(onnx.__file__).parent / "backend/test/data/light"
    for name in ("shufflenet", "squeezenet", "bvlc_alexnet"):
        shutil.copy(light / f"light_{name}.onnx", f"{name}.forward.onnx")


def write_strategies():
    def write(name, parameters, **more):
        made = {"format": "partc-strategy/1", "batch": "per-replica", "parameters": parameters} | more
        Path(f"{name}.json").write_text(json.dumps(made))

    write("open_global", {}, batch="global")
    write(
        "foreign_user",
        {
            "E": {
                "method": "servers",
                "shards": [
                    {"host": "host0", "start": 0, "stop": 7},
                    {"host": "host1", "start": 7, "stop": 20},
                ],
            },
            "W": {"method": "all_reduce"},
        },
    )


def fixture(checkout, name):
    found = sorted(p for p in checkout.glob(f"tests/**/{name}") if ".venv" not in p.parts)
    assert found, name
    return found[0]


SCE = ["--loss", "softmax_cross_entropy"]
LM = (
    "lm --set vocab=500 --set embedding=8 --set cells=16 --set projection=8 --set steps=3 "
    "--set samples=32 --set batch=12"
)
NMT = (
    "nmt --set source_vocab=200 --set target_vocab=160 --set embedding=8 --set cells=8 --set source_steps=4 "
    "--set target_steps=4 --set batch=12"
)
MLP = "mlp --set sizes=6,8,3 --set batch=12"
MODELS = {
    "mlp": MLP,
    "lm": LM,
    "nmt": NMT,
    "resnet50": "resnet50 --set width=4 --set image=32 --set classes=10 --set batch=8",
}
# name: (forward graph, options of `partc grad`)
GRADS = {
    "mlp": ("mlp", [*SCE]),
    "mlp-momentum": (
        "mlp",
        [
            *SCE,
            "--optimizer",
            "momentum",
            "--clip-global-norm",
            "1",
            "--schedule",
            "cosine:steps=50,floor=0.1",
            "--warmup",
            "5",
        ],
    ),
    "mlp-adamw": (
        "mlp",
        [*SCE, "--optimizer", "adamw", "--weight-decay", "0.01", "--no-decay", "*bias*", "--ema", "0.9"],
    ),
    "mlp-lamb": ("mlp", [*SCE, "--optimizer", "lamb", "--accumulate", "2"]),
    "mlp-scaled": ("mlp", [*SCE, "--optimizer", "adafactor", "--clip-norm", "1", "--lr", "fed"]),
    "mlp-info": ("mlp", [*SCE, "--optimizer", "momentum", "--format", "training-info"]),
    "lm-adagrad": ("lm", ["--loss", "loss", "--optimizer", "adagrad"]),
    "lm-clipped": ("lm", ["--loss", "loss", "--optimizer", "adagrad", "--clip-global-norm", "5"]),
    "lm-adam": ("lm", ["--loss", "loss", "--optimizer", "adam", "--set-optimizer", "lazy=true"]),
    "nmt-sgd": ("nmt", ["--loss", "loss"]),
    "nmt-adam": ("nmt", ["--loss", "loss", "--optimizer", "adam", "--clip-value", "1"]),
    "resnet50-momentum": ("resnet50", [*SCE, "--optimizer", "momentum"]),
    "transformer-adamw": ("transformer", [*SCE, "--optimizer", "adamw", "--batch-size", "8"]),
    "transformer-dynamic": ("transformer", [*SCE, "--optimizer", "rmsprop", "--clip-global-norm", "1"]),
    "shufflenet": ("shufflenet", [*SCE, "--batch-size", "4", "--reinit"]),
    "squeezenet": ("squeezenet", [*SCE, "--batch-size", "4", "--reinit", "--optimizer", "nesterov"]),
}


def compilations(checkout):
    """name -> arguments of `partc compile`, the output left out."""
    both = ("per-replica", "global")
    made = {}

    def add(graph, where, *options, file=None):
        name = "_".join(
            [
                graph,
                where,
                *(
                    str(o).strip("-").replace("/", "-").replace("=", "-")
                    for o in options
                    if "/" not in str(o)
                ),
            ]
        )
        assert name not in made, name
        made[name] = [file or f"{graph}.onnx", "-c", f"{where}.json", *map(str, options)]

    for where in ("c1x1", "c2x2", "c1x3"):
        add("mlp", where)
    for mode in ("auto", "hybrid", "allreduce", "ps"):
        add("mlp-momentum", "c2x2", "--strategy", mode, "--batch", "global")
        add("lm-adagrad", "c2x2", "--strategy", mode)
    for mode in ("hybrid", "ps"):
        add("lm-clipped", "c3x1", "--strategy", mode, "--batch", "global")
        add("lm-clipped", "gpus", "--strategy", mode)
        add("nmt-adam", "c2x2", "--strategy", mode, "--batch", "global")
    add("lm-adagrad", "c1x1")
    add("lm-adam", "c2x2", "--strategy", "hybrid")
    add(
        "lm-adam",
        "c2x2",
        "--strategy",
        "ps",
        "--without",
        "local-aggregation",
        "--without",
        "post-aggregation",
    )
    add("lm-adagrad", "c2x2", "--strategy", "hybrid", "--without", "boundary-ops")
    add("lm-adagrad", "mixed")
    add("lm-adagrad", "c2x2", "--search-partitions", "model", "--strategy", "ps")
    add("lm-adagrad", "c2x2", "--min-partitions", 2, "--search-partitions", "off", "--strategy", "hybrid")
    add("lm-adagrad", "c8x8", "--strategy", "hybrid")
    add("lm-adagrad", "c2x2", "--asynchronous", "--batch", "per-replica")
    add("lm-adagrad", "gpus", "--asynchronous", "--batch", "per-replica", "--strategy", "ps")
    add("lm-adagrad", "c2x2", "--decisions-only")
    add("lm-adagrad", "c2x2", "--sum-sparse", "--batch", "per-replica")
    add("nmt-sgd", "c2x2")
    add("nmt-sgd", "c1x3", "--recompute", "1MB", "--strategy", "allreduce", "--batch", "per-replica")
    add("mlp-adamw", "c1x3", "--batch", "global")
    add("mlp-adamw", "mixed")
    add("mlp-adamw", "c8x8", "--batch", "per-replica")
    add("mlp-lamb", "c2x2")
    add("mlp-scaled", "c2x2", "--strategy", "allreduce")
    add("mlp-info", "c2x2", "--strategy", "ps")
    add("mlp", "c1x3", "--asynchronous", "--batch", "per-replica")
    add("mlp-momentum", "c2x2", "--recompute", "1008")
    add("mlp-momentum", "c2x2", "--decisions-only", "--batch", "global")
    add("mlp-momentum", "c2x2", "--fetch-gradients", "layer0.weight,layer1.bias", "--batch", "global")
    add("resnet50-momentum", "c2x2", "--batch", "per-replica")
    add("resnet50-momentum", "c1x3", "--strategy", "hybrid", "--batch", "per-replica", "--recompute", "1MB")
    add("resnet50-momentum", "c2x2", "--batch", "global", "--strategy", "allreduce")
    for batch in both:
        add("transformer-adamw", "c2x2", "--batch", batch)
    add("transformer-adamw", "c1x3", "--strategy", "ps", "--recompute", "80000")
    add("transformer-dynamic", "c2x2", "--size", "B=8")
    add("transformer-dynamic", "gpus", "--strategy", "hybrid", "--size", "B=8", "--batch", "global")
    add("transformer-adamw", "c2x2", "--asynchronous", "--batch", "per-replica")
    add("shufflenet", "c2x2", "--strategy", "allreduce")
    add("squeezenet", "c1x3", "--strategy", "hybrid")
    first = ["--initial", "foreign.npz", "--state", "E=E_next,W=W_next,count=count_next", "--loss", "loss"]
    made["foreign_c2x2"] = ["foreign.onnx", "-c", "c2x2.json", *first]
    made["foreign_c2x2_global"] = [
        "foreign.onnx",
        "-c",
        "c2x2.json",
        *first,
        "--batch",
        "global",
        "--strategy",
        "ps",
    ]
    made["foreign_c2x2_user"] = ["foreign.onnx", "-c", "c2x2.json", *first, "--strategy", "foreign_user.json"]
    made["mlp-momentum_open_global"] = [
        "mlp-momentum.onnx",
        "-c",
        "c2x2.json",
        "--strategy",
        "open_global.json",
    ]
    made["jax_c2x2"] = ["jax_step.onnx", "-c", "c2x2.json"]
    made["pytorch_c2x2"] = ["pytorch_step_float32.onnx", "-c", "c2x2.json"]
    made["pytorch64_c1x3_hybrid"] = [
        "pytorch_step_float64.onnx",
        "-c",
        "c1x3.json",
        "--strategy",
        "hybrid",
        "--batch",
        "per-replica",
    ]
    for name in ("cnn", "embedding", "transformer"):
        made[f"ort_{name}"] = [f"ort_{name}", "-c", "c2x2.json", "--strategy", "hybrid"]
    return made


def gather_fixtures(checkout):
    for name in ("jax_step.onnx", "pytorch_step_float32.onnx", "pytorch_step_float64.onnx"):
        for suffix in ("", ".json"):
            shutil.copy(fixture(checkout, name + suffix), name + suffix)
    for name in ("cnn", "embedding", "transformer"):
        shutil.copytree(fixture(checkout, f"ort_training/{name}"), f"ort_{name}")


# ---------------------------------------------------------------- the work


def hashes(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in LOGS
    }


def work(checkout, out, only):
    (entry,) = [e for e in importlib.metadata.entry_points(group="console_scripts") if e.name == "partc"]
    main = entry.load()
    where = Path(sys.modules[main.__module__].__file__)
    assert where.is_relative_to(checkout), f"{where} is not of {checkout}"

    def partc(*arguments):
        said, complained = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
            code = main([str(a) for a in arguments])
        return code, complained.getvalue().strip()

    folder = Path(tempfile.mkdtemp(prefix="hash-plans-"))
    os.chdir(folder)
    try:
        write_clusters()
        write_texts()
        write_strategies()
        gather_fixtures(checkout)
        result = {}

        def record(name, code, complaint, made):
            if code != 0:
                result[name] = {"exit": code, "complaint": complaint.splitlines()[:3]}
            elif made.is_dir():
                result[name] = hashes(made)
            else:
                result[name] = {made.name: hashlib.sha256(made.read_bytes()).hexdigest()}

        for name, text in MODELS.items():
            code, complaint = partc("model", *text.split(), "-o", f"{name}.forward.onnx")
            assert code == 0, complaint
        for name, (forward, options) in GRADS.items():
            record(
                f"grad {name}",
                *partc("grad", f"{forward}.forward.onnx", *options, "-o", f"{name}.onnx"),
                Path(f"{name}.onnx"),
            )
        for name, arguments in compilations(checkout).items():
            if only and not any(word in name for word in only):
                continue
            start = time.monotonic()
            target = Path("plans") / name
            code, complaint = partc("compile", *arguments, "-o", target)
            record(f"compile {name}", code, complaint, target)
            spent = time.monotonic() - start
            print(
                f"{spent:6.1f} s  {name}" + (f"  EXIT {code}: {complaint}" if code else ""),
                file=sys.stderr,
                flush=True,
            )
    finally:
        os.chdir("/")
        if not os.environ.get("KEEP"):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(folder, file=sys.stderr)
    out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    plans = sum(1 for name, r in result.items() if name.startswith("compile") and "exit" not in r)
    files = sum(len(r) for r in result.values() if "exit" not in r)
    print(f"{plans} plans, {files} files -> {out}", file=sys.stderr)


def diff(a, b):
    first, second = (json.loads(Path(p).read_text()) for p in (a, b))
    different = 0
    for name in sorted({*first, *second}):
        one, other = first.get(name), second.get(name)
        if one != other:
            different += 1
            files = (
                []
                if one is None or other is None
                else [f for f in sorted({*one, *other}) if one.get(f) != other.get(f)]
            )
            print(name, "missing" if not files else files[:8])
    print(f"{different} of {len({*first, *second})} differ")
    return 1 if different else 0


if __name__ == "__main__":
    if sys.argv[1] == "--diff":
        sys.exit(diff(*sys.argv[2:4]))
    checkout, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).absolute()
    only = sys.argv[3:]
    python = checkout / ".venv/bin/python"
    if Path(sys.prefix).resolve() != (checkout / ".venv").resolve():
        os.execv(python, [str(python), os.path.abspath(__file__), str(checkout), str(out), *only])
    work(checkout, out, only)
