"""What Python callers meet: errors of one tree in three parts, and no traceback from below."""

import re
import sysconfig
from collections.abc import Callable, Mapping
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

import partc
from partc.runtime.check_arguments import public
from partc.runtime.errors import (
    BadCluster,
    BadData,
    BadModel,
    BadPlan,
    BadProfile,
    BadUsage,
    InternalError,
    PartcError,
)
from partc.runtime.jobs.job import Checkpoints
from partc.runtime.plan.plan_folder import PlanFolder
from tests.checks.command_line import EXAMPLES

CLUSTER = str(EXAMPLES / "cluster-1x4.json")
X, LABELS = np.zeros((16, 6), np.float32), np.zeros(16, np.int64)
MASKED = {"x": np.ma.array(X, mask=np.arange(96).reshape(16, 6) == 7), "labels": LABELS}
api: Any = partc  # what callers without a type checker see


class Given:
    """What the cases below work with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.forward = partc.build_model("mlp", sizes=(6, 8, 3), batch=4)
        self.train = partc.build_training_graph(
            self.forward, loss="softmax_cross_entropy", optimizer=partc.SGD(0.1)
        )
        self.plan: PlanFolder = partc.compile(self.train, CLUSTER, folder / "out")
        (folder / "garbage.json").write_text("{nope")
        (folder / "text.onnx").write_text("hello, I am no model")
        (folder / "cut.onnx").write_bytes(self.train.SerializeToString()[:-40])

    def compile(self, **fields: Any) -> object:
        return api.compile(self.train, CLUSTER, self.folder / "new", **fields)

    def build(self, **fields: Any) -> object:
        settings = {"loss": "softmax_cross_entropy", "optimizer": partc.SGD(0.1)} | fields
        return api.build_training_graph(self.forward, **settings)

    def run(self, data: object = "synthetic", steps: object = 1, **fields: Any) -> object:
        return api.Runner(self.plan).train(data, steps, **fields)

    def feed(self, feeds: object = None, **fields: Any) -> None:
        with api.get_runner(self.train, CLUSTER, **fields) as runner:
            runner.run("loss", feeds)

    def start(self, *config: Any, **fields: Any) -> object:
        return api.get_runner(self.train, CLUSTER, *config, **fields)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    return Given(tmp_path_factory.mktemp("api"))


Case = tuple[Callable[[Given], object], type[PartcError], str, str, str]
CASES: Mapping[str, Case] = {
    # the training graph
    "no graph": (lambda g: api.compile(None, CLUSTER, "o"), BadUsage, "None is not", "train=...", "ModelProto"),
    "bytes": (lambda g: api.compile(b"a", CLUSTER, "o"), BadUsage, "b'a' is not", "train=...", "a Path"),
    "no file": (lambda g: api.compile("no.onnx", CLUSTER, "o"), BadModel, "no such file", "no.onnx", "path"),
    "text": (lambda g: api.inspect(g.folder / "text.onnx"), BadModel, "not an ONNX model", "text.onnx", "copy"),
    "cut": (lambda g: api.inspect(g.folder / "cut.onnx"), BadModel, "", "cut.onnx", ""),
    "empty": (lambda g: api.inspect(onnx.ModelProto()), BadModel, "nothing says which outputs", "", ""),
    "forward": (lambda g: api.inspect(g.forward), BadModel, "nothing says which outputs", "", "partc grad"),
    # the cluster
    "no cluster": (lambda g: api.compile(g.train, None, "o"), BadUsage, "None is not", "cluster=", "a Cluster"),
    "dict": (lambda g: api.compile(g.train, {}, "o"), BadUsage, "{} is not", "cluster=...", "a Cluster"),
    "garbage": (
        lambda g: api.compile(g.train, g.folder / "garbage.json", "o"),
        BadCluster, "not JSON", "garbage.json", "syntax",
    ),
    "no file of it": (lambda g: api.compile(g.train, "no.json", "o"), BadCluster, "cannot be read", "no.json", ""),
    # where to write
    "nowhere": (lambda g: api.compile(g.train, CLUSTER, None), BadUsage, "None is not", "out=...", "a Path"),
    "unwritable": (lambda g: api.compile(g.train, CLUSTER, "/proc/x/y"), BadUsage, "", "/proc/x", "read and write"),
    "a file": (lambda g: api.compile(g.train, CLUSTER, g.folder / "text.onnx"), BadUsage, "", "text.onnx", "empty"),
    # how it is called
    "nothing": (lambda g: api.compile(), BadUsage, "missing", "compile()", "call compile(train, cluster, out)"),
    "misspelt": (lambda g: g.compile(stratgy="ps"), BadUsage, "'stratgy'", "Options()", "'strategy' is the nearest"),
    "by place": (
        lambda g: api.compile(g.train, CLUSTER, "o", "ps"),
        BadUsage, "more than a step, a cluster and an output", "compile()", "strategy='auto'",
    ),
    "field": (lambda g: api.Options(stratgy="ps"), BadUsage, "'stratgy'", "Options()", "'strategy' is the nearest"),
    "rate's name": (lambda g: api.SGD(rate=1), BadUsage, "'rate'", "SGD()", "use one of lr"),
    "Parallax's field": (
        lambda g: api.ParallaxConfig(run_option="PS"), BadUsage, "'run_option'", "ParallaxConfig()", "strategy",
    ),
    "Parallax's value": (
        lambda g: api.ParallaxConfig(strategy="AR"), BadUsage, "'AR'", "ParallaxConfig.strategy", "write 'allreduce'",
    ),
    "kind of optimizer": (
        lambda g: g.build(optimizer=api.SGD), BadUsage, "SGD'> is not an optimizer", "optimizer", "partc.SGD(0.1)",
    ),
    "too many fields": (
        lambda g: api.Sample("synthetic", 8, 9), BadUsage, "too many", "Sample()", "call Sample(data)",
    ),
    "strategy": (lambda g: g.compile(strategy=3), BadUsage, "3 is not text", "strategy=...", "a Strategy"),
    "no strategy": (lambda g: g.compile(strategy="hybird"), BadUsage, "'hybird'", "--strategy", "'hybrid'"),
    "batch": (lambda g: g.compile(batch="globl"), BadUsage, "'globl'", "batch=...", "'global' is the nearest"),
    "sizes": (lambda g: g.compile(sizes={"b": "x"}), BadUsage, "'x' is not", "sizes=...)['b']", "a whole number"),
    "options": (lambda g: g.compile(options={}), BadUsage, "{} is not", "options=...", "GraphOptions"),
    "state": (
        lambda g: g.compile(options=api.GraphOptions(state="W")),
        BadUsage, "'W' is not", "GraphOptions.state", "mapping",
    ),
    "search": (lambda g: g.compile(search={}), BadUsage, "{} is not", "search=...", "SearchOptions"),
    "method": (
        lambda g: g.compile(search=api.SearchOptions(method="mcm")),
        BadUsage, "'mcm'", "SearchOptions.method", "'mcmc' is the nearest",
    ),
    "endless search": (lambda g: api.SearchOptions(inf), BadUsage, "a search of inf s", "budget_s", "more than 0"),
    "no search": (lambda g: api.SearchOptions(nan), BadUsage, "a search of nan s", "budget_s", "more than 0"),
    "search back": (lambda g: api.SearchOptions(-1), BadUsage, "a search of -1 s", "budget_s", "more than 0"),
    "proposals": (lambda g: api.SearchOptions(proposals=0), BadUsage, "0 proposals", "proposals", "at least one"),
    "partitions": (lambda g: g.compile(partitions="two"), BadUsage, "'two'", "partitions=...", "whole number"),
    "without": (lambda g: g.compile(without=["no"]), BadUsage, "'no'", "without=...", "local-aggregation"),
    "aggregation": (lambda g: g.compile(aggregation="sum"), BadUsage, "'sum'", "aggregation=...", "Aggregation"),
    "batch's kind": (lambda g: g.compile(batch={"a": 1}), BadUsage, "{'a': 1}", "batch=...", "'global'"),
    "rounding": (lambda g: g.compile(round_sums="float8"), BadUsage, "'float8'", "round_sums=...", "'float16'"),
    "bytes at once": (lambda g: g.compile(recompute_bytes="1GB"), BadUsage, "'1GB'", "recompute_bytes", "whole"),
    "no bytes": (lambda g: g.compile(recompute_bytes=-1), BadUsage, "-1 bytes are no", "recompute_bytes", "at least 1"),
    "no batch": (lambda g: g.compile(sizes={"b": 0}), BadUsage, "b = 0 is no size", "sizes", "at least 1"),
    "inspected": (lambda g: api.inspect(g.train, sizes={"b": -1}), BadUsage, "b = -1 is no size", "sizes", ""),
    "profile": (lambda g: g.compile(profile="no.json"), BadProfile, "cannot be read", "no.json", ""),
    "flag": (lambda g: g.compile(asynchronous="yes"), BadUsage, "'yes'", "asynchronous=...", "True or False"),
    "search's": (lambda g: api.search(g.train, CLUSTER, {}), BadUsage, "{} is not", "search(options=...)", "Options"),
    # making a training graph
    "model": (lambda g: api.build_model(None), BadUsage, "None is not text", "build_model(name=...)", "text"),
    "no model": (lambda g: api.build_model("restnet"), BadUsage, "no model", "model name", "resnet50"),
    "its option": (lambda g: api.build_model("mlp", depth=3), BadUsage, "'depth'", "options of model", "sizes"),
    "its value": (lambda g: api.build_model("mlp", batch="x"), BadUsage, "`$.batch`", "options of model", "batch"),
    "no forward": (lambda g: api.build_training_graph("f.onnx", loss="mse", optimizer=partc.SGD()), BadUsage,
                   "'f.onnx' is not", "forward=...", "ModelProto"),
    "loss": (lambda g: g.build(loss=3), BadUsage, "3 is not text", "loss=...", "text"),
    "no loss": (lambda g: g.build(loss="hinge"), BadUsage, "'hinge'", "--loss", "logits"),
    "optimizer": (lambda g: g.build(optimizer="sgd"), BadUsage, "'sgd' is not an optimizer", "optimizer", "partc.SGD"),
    "rate": (lambda g: g.build(optimizer=api.SGD("x")), BadUsage, "'x'", "SGD, lr", "number"),
    "no label": (lambda g: g.build(ignore_index=10**30), BadUsage, "is not a label", "--ignore-index", "64 bits"),
    "batch size": (lambda g: g.build(batch_size="x"), BadUsage, "'x'", "batch_size=...", "'dynamic'"),
    "partitioner": (lambda g: api.get_partitioner("x"), BadUsage, "'x'", "min_partitions=...", "whole number"),
    "inputs": (lambda g: api.create_num_shards_and_shard_id(3), BadUsage, "too many", "create_num_shards", ""),
    "export": (lambda g: api.torch.export_step(None), BadUsage, "missing", "export_step()", "export_step(module"),
    # training
    "no plan": (lambda g: api.Runner(None), BadUsage, "None is not", "Runner(plan=...)", "PlanFolder"),
    "no folder": (lambda g: api.Runner("nowhere"), BadPlan, "no plan can be read", "nowhere", "partc compile"),
    "data": (lambda g: g.run(5), BadUsage, "5 is not", "Runner.train(data=...)", "an iterable"),
    "arrays": (lambda g: g.run([X]), BadUsage, "ndarray is not", "data=...)[0]", "text to an array"),
    "generated": (lambda g: g.run(x for x in [X]), BadData, "a batch is a ndarray", "data", "input name -> array"),
    "lists": (lambda g: g.run(x for x in [{"x": [1], "labels": LABELS}]), BadData, "is a list", "'x'", "asarray"),
    "masked": (lambda g: g.run([MASKED]), BadData, "1 of 96 elements are masked", "'x'", "array.filled"),
    "masked, generated": (lambda g: g.run(iter([MASKED])), BadData, "1 of 96 elements", "'x'", "array.filled"),
    "masked, verified": (lambda g: api.verify(g.plan, data=[MASKED], steps=1), BadData, "1 of 96", "'x'", "filled"),
    "masked, fed": (
        lambda g: g.feed({name: [array[:4]] * 4 for name, array in MASKED.items()}),
        BadData, "1 of 24 elements", "feeds, data input 'x'", "array.filled",
    ),
    "masked, sharded": (
        lambda g: g.feed(data=partc.shard([{name: array[:4] for name, array in MASKED.items()}] * 4)),
        BadData, "1 of 24 elements", "'x'", "array.filled",
    ),
    "masked values": (lambda g: g.run(initial={"W": MASKED["x"]}), BadData, "1 of 96", "initial values: W", "filled"),
    "shape": (lambda g: g.run([{"x": X[:, :3], "labels": LABELS}]), BadData, "[16, 3]", "'x'", ""),
    "too few": (lambda g: g.run([{"x": X, "labels": LABELS}], 3), BadData, "1 batches", "data", "a batch per step"),
    "steps": (lambda g: g.run(steps="3"), BadUsage, "'3'", "steps=...", "a whole number"),
    "half steps": (lambda g: g.run(steps=1.5), BadUsage, "1.5", "steps=...", "a whole number"),
    "initial": (lambda g: g.run(initial={"q": X}, steps=1, sizes={"q": 3}), BadUsage, "'q'", "sizes", "leave it out"),
    "read after": (lambda g: g.run(read_after=[7]), BadUsage, "no step 7 of 1", "read_after", "from 1"),
    "no range": (lambda g: g.run(steps=9, traced_steps=((5, 2),)), BadUsage, "5 to 2", "--trace-steps", "the first"),
    "no last": (lambda g: g.run(traced_steps=-1), BadUsage, "the last -1 steps", "--trace-steps", "how many"),
    "half a range": (lambda g: g.run(traced_steps=((5,),)), BadUsage, "(5,) is not", "traced_steps", "a tuple"),
    "no end": (lambda g: g.run(timeout_s=inf), BadUsage, "a timeout of inf s", "--timeout", "more than 0"),
    "size": (lambda g: g.run(sizes={"b": 0}), BadUsage, "b = 0 is no size", "sizes", "at least 1"),
    "restarts": (lambda g: g.run(worker_restarts=-1), BadUsage, "-1 restarts", "worker_restarts", "0 or more"),
    "saves": (lambda g: Checkpoints("here", 0), BadUsage, "every_steps of 0", "Checkpoints.every_steps", "more than 0"),
    "kept": (lambda g: Checkpoints("here", keep=-1), BadUsage, "keep of -1", "Checkpoints.keep", "more than 0"),
    "outputs": (lambda g: g.run(outputs="some"), BadUsage, "'some'", "outputs=...", "use one of none, loss, all"),
    "seed": (lambda g: g.run(seed="x"), BadUsage, "'x'", "seed=...", "a whole number"),
    "checkpoints": (lambda g: g.run(checkpoints="here"), BadUsage, "'here'", "checkpoints=...", "Checkpoints"),
    "resume": (lambda g: g.run(resume=True), BadUsage, "no checkpoints", "resume=True", "checkpoints="),
    "kept twice": (lambda g: g.run(keep_in=g.folder), BadUsage, "two places", "keep_in", "save=False"),
    "verify": (lambda g: api.verify(g.plan, steps="x"), BadUsage, "'x'", "verify(steps=...)", "a whole number"),
    "verify what": (lambda g: api.verify("nowhere"), BadPlan, "no plan can be read", "nowhere", "partc compile"),
    # Parallax's interface
    "config": (lambda g: g.start({"sync": True}), BadUsage, "{'sync': True}", "config=...", "ParallaxConfig"),
    "its field": (lambda g: g.start(api.ParallaxConfig(strategy=3)), BadUsage, "3", "ParallaxConfig.strategy", "text"),
    "its wait": (
        lambda g: api.ParallaxConfig(timeout_s=nan), BadUsage, "a timeout of nan s", "ParallaxConfig.timeout_s", "than 0",
    ),
    "feeds": (lambda g: g.start(data=3), BadUsage, "3 is not", "data=...", "ShardedData"),
    "resources": (lambda g: api.get_runner(g.train, "no.txt"), BadCluster, "cannot be read", "no.txt", "path"),
    "no function": (lambda g: api.parallel_run(g.train, None, CLUSTER), BadUsage, "None", "run=...", "a function"),
    "shard": (lambda g: api.shard(3), BadUsage, "3 is not", "shard(data=...)", "an iterable"),
    "shard's name": (lambda g: api.shard("nomodule:f"), BadData, "nomodule", "--data", ""),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "what", "at", "fix"), CASES.values(), ids=list(CASES))
def test_a_wrong_call_is_told_in_three_parts(
    given: Given, call: Callable[[Given], object], kind: type[PartcError], what: str, at: str, fix: str
) -> None:
    with pytest.raises(PartcError) as caught:
        call(given)

    error = caught.value
    assert type(error) is kind
    assert what in error.what and at in error.at and fix in error.fix, str(error)
    assert error.what and error.at and error.fix
    assert str(error) == f"{error.what}\n  at:  {error.at}\n  fix: {error.fix}"


def test_nothing_is_written_by_calls_that_are_refused(given: Given) -> None:
    assert not (given.folder / "new").exists()


# Code that is in no file, as what is typed, and in one of an installed package.
TYPED = """
from collections import UserDict

def batches(batch):
    yield batch
    raise ValueError("mine")

def ends_by_accident(batch):
    yield batch
    yield next(iter([]))

def tell(*_):
    raise ValueError("mine")

class Lazy(UserDict):
    def __getitem__(self, name):
        raise LookupError("mine")
"""
INSTALLED = f"{sysconfig.get_paths()['purelib']}/somebodys/data.py"
BATCH = {"x": X, "labels": LABELS}


def typed(file: str = "<stdin>") -> SimpleNamespace:
    names: dict[str, Any] = {}
    exec(compile(TYPED, file, "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.parametrize("file", ["<string>", "<ipython-input-1>", INSTALLED])
def test_what_a_callers_own_code_raises_is_its_own_wherever_it_lies(given: Given, file: str) -> None:
    with pytest.raises(ValueError, match="mine"):
        given.run(typed(file).batches(BATCH), 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda g, own: g.run(own.batches(BATCH), 3),
        lambda g, own: g.run(on_progress=own.tell),
        lambda g, own: g.run(checkpoints=Checkpoints(str(g.folder / "saved")), on_progress=own.tell),
        lambda g, own: api.verify(g.plan, steps=1, on_step=own.tell),
        lambda g, own: api.search(
            g.train, CLUSTER, partc.Options(search=partc.SearchOptions(proposals=1)), own.tell
        ),
        lambda g, own: g.build(tell=own.tell),
        lambda g, own: api.parallel_run(g.train, own.tell, CLUSTER),
        lambda g, own: g.start(data=api.shard(own.tell)),
    ],
    ids=["batches", "progress", "saved progress", "step", "search", "tell", "run", "shards"],
)
def test_what_a_callers_own_code_raises_is_its_own(
    given: Given, call: Callable[[Given, Any], object]
) -> None:
    with pytest.raises(ValueError, match="mine"):
        call(given, typed())


@pytest.mark.parametrize(
    ("batches", "kind", "said"),
    [
        (lambda: typed().ends_by_accident(BATCH), RuntimeError, "generator raised StopIteration"),
        (lambda: map(dict, [3]), TypeError, "'int' object is not iterable"),
        (lambda: map(np.load, ["nowhere.npy"]), FileNotFoundError, "nowhere.npy"),
        (lambda: iter([typed().Lazy(BATCH)]), LookupError, "mine"),
    ],
    ids=["ends by accident", "of C", "no file", "lazy"],
)
def test_what_a_callers_iterator_raises_is_its_own(
    given: Given, batches: Callable[[], object], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        given.run(batches(), 2)


def test_what_a_named_function_raises_comes_through_where_it_runs_in_this_process(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_batches.py").write_text(
        f"import numpy as np\n{TYPED}\n"
        "def read():\n"
        "    return batches({'x': np.zeros((16, 6), np.float32), 'labels': np.zeros(16, np.int64)})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ValueError, match="mine"):
        api.verify(given.plan, steps=2, data="named_batches:read")


def test_what_nobody_foresaw_is_of_the_tree_and_says_whose_mistake_it_is(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("partc.compiler.api.find_gradients", len)

    with pytest.raises(InternalError, match="TypeError: object of type 'TrainingGraph'") as caught:
        api.inspect(given.train)
    assert "this is a mistake of partc" in caught.value.fix
    assert re.search(r"compiler/api.py:\d+, in inspect", caught.value.at)
    assert isinstance(caught.value.__cause__, TypeError)


def test_types_of_every_kind_are_looked_into() -> None:
    @public
    def take(
        number: float = 0.0, names: tuple[str, ...] = (), call: Callable[[], int] | None = None, **others: int
    ) -> str:
        return f"{number} {names}"

    loose: Any = take
    assert loose(np.int64(3), ["a"], call=lambda: 1, other="any") == "3 ['a']"
    for fault in ({"number": True}, {"names": "ab"}, {"names": (1,)}, {"call": 3}):
        with pytest.raises(BadUsage):
            loose(**fault)
