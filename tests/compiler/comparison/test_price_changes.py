"""What `--what-if` prices is what compiling with the changed input predicts, and what the plan then takes."""

from pathlib import Path

import msgspec
import pytest

from partc.compiler import api
from partc.compiler.comparison.list_changes import list_changes
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.cost.cluster.cluster import Cluster, encode_cluster, read_cluster
from partc.cost.cluster.machines import Link
from partc.cost.cluster.vary_cluster import with_hosts
from partc.cost.simulation.memory import memory_of
from partc.cost.what_if import PricedChange, WhatIf
from partc.runtime.plan.plan_folder import read_plan_folder
from tests.builders.plans.compiled_steps import cluster_of
from tests.builders.plans.deep_mlp import BY_1F1B, deep_mlp
from tests.builders.plans.small_devices import small_devices
from tests.builders.plans.wide_mlp import wide_mlp
from tests.checks.command_line import CLUSTER, done, refused


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, WhatIf]:
    folder = tmp_path_factory.mktemp("what-if")
    (folder / "train.onnx").write_bytes(wide_mlp().SerializeToString())
    told = done("compile", folder / "train.onnx", "-c", CLUSTER, "-o", folder / "out", "--what-if")
    assert "what if: 0/" in told and "changes priced" in told
    return folder, msgspec.json.decode((folder / "out" / "what-if.json").read_bytes(), type=WhatIf)


def change_of(what_if: WhatIf, dimension: str, value: str) -> PricedChange:
    return next(c for c in what_if.changes if (c.dimension, c.value) == (dimension, value))


def edited_links(folder: Path, factor: float) -> Path:
    """Write the cluster file with other links, as a person would."""
    cluster = msgspec.json.decode(Path(CLUSTER).read_bytes())
    for link in cluster["links"]:
        link["bytes_per_s"] *= factor
    path = folder / f"links-{factor}.json"
    path.write_bytes(msgspec.json.encode(cluster))
    return path


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_links_are_priced_as_an_edited_cluster_file_is(
    priced: tuple[Path, WhatIf], factor: float, tmp_path: Path
) -> None:
    folder, what_if = priced
    cluster = edited_links(tmp_path, factor)
    change = change_of(what_if, "links", f"x{factor:g}")

    plan = api.compile(folder / "train.onnx", cluster, tmp_path / "out").plan
    simulated = done("simulate", folder / "out", "-c", cluster, "--json")

    assert change.compiled is not None and change.same_plan is not None
    assert change.compiled.step_s == plan.predicted_step_s
    assert change.same_plan.step_s == msgspec.json.decode(simulated)["step_s"]


def test_hosts_are_priced_as_a_cluster_file_with_more_of_them_is(
    priced: tuple[Path, WhatIf], tmp_path: Path
) -> None:
    folder, what_if = priced
    cluster = read_cluster(Path(CLUSTER))
    (link,) = cluster.links  # from one host to the other: of four, every two have such a link
    hosts, links = list(cluster.hosts), list(cluster.links)
    for name in ("third", "fourth"):
        devices = tuple(
            msgspec.structs.replace(device, name=f"{name}/{number}")
            for number, device in enumerate(hosts[-1].devices)
        )
        links += [Link((host.name, name), link.bytes_per_s, link.latency_s) for host in hosts]
        hosts.append(msgspec.structs.replace(hosts[-1], name=name, devices=devices))
    more = msgspec.structs.replace(cluster, hosts=tuple(hosts), links=tuple(links))
    (tmp_path / "more.json").write_bytes(encode_cluster(more))

    plan = api.compile(folder / "train.onnx", tmp_path / "more.json", tmp_path / "out").plan

    change = change_of(what_if, "hosts", "4")
    assert change.compiled is not None
    assert change.compiled.step_s == pytest.approx(plan.predicted_step_s, rel=1e-12)


@pytest.mark.parametrize("strategy", ["ps", "tensor=2"])
def test_strategies_are_priced_as_they_are_compiled(
    priced: tuple[Path, WhatIf], strategy: str, tmp_path: Path
) -> None:
    folder, what_if = priced
    change = change_of(what_if, "strategy", strategy)

    plan = api.compile(folder / "train.onnx", CLUSTER, tmp_path / "out", strategy=strategy).plan

    assert change.compiled is not None
    assert change.compiled.step_s == plan.predicted_step_s


def test_a_batch_is_priced_as_that_size_is_compiled(priced: tuple[Path, WhatIf], tmp_path: Path) -> None:
    folder, what_if = priced
    change = next(c for c in what_if.changes if c.dimension == "batch" and c.value.endswith("=16"))

    size = change.value.partition("=")[0]
    plan = api.compile(folder / "train.onnx", CLUSTER, tmp_path / "out", sizes={size: 16}).plan

    assert change.compiled is not None
    assert change.compiled.step_s == plan.predicted_step_s
    assert change.compiled.samples == 16 * plan.replicas


def test_the_plan_itself_is_the_same_whether_changes_are_priced_or_not(
    priced: tuple[Path, WhatIf], tmp_path: Path
) -> None:
    folder, what_if = priced
    api.compile(folder / "train.onnx", CLUSTER, tmp_path / "out")

    without, beside = read_plan_folder(tmp_path / "out").plan, read_plan_folder(folder / "out").plan

    assert "what-if.json" in beside.files
    assert without.instructions == beside.instructions
    assert what_if.plan.step_s == beside.predicted_step_s == without.predicted_step_s


@pytest.mark.long
def test_changes_are_priced_with_as_many_micro_batches_under_way_as_there_is_memory_for(
    tmp_path: Path,
) -> None:
    strategy = "pipeline=2,microbatches=8"
    roomy, few = _with_quick_links(cluster_of("2x2")), {"strategy": strategy, "batch": "global", **BY_1F1B}
    by_1f1b = api.compile(deep_mlp(), roomy, tmp_path / "few", **few).plan
    by_more = api.compile(deep_mlp(), roomy, tmp_path / "more", strategy=strategy, batch="global").plan
    assert by_more.instructions != by_1f1b.instructions
    most_bytes = max(need.certain_bytes for need in memory_of(by_1f1b, roomy))
    tight = _with_quick_links(small_devices("2x2", most_bytes))
    (tmp_path / "train.onnx").write_bytes(deep_mlp().SerializeToString())
    (tmp_path / "tight.json").write_bytes(encode_cluster(tight))
    asked = ("--strategy", strategy, "--batch", "global", "--what-if")
    done("compile", tmp_path / "train.onnx", "-c", tmp_path / "tight.json", "-o", tmp_path / "out", *asked)
    what_if = msgspec.json.decode((tmp_path / "out" / "what-if.json").read_bytes(), type=WhatIf)

    for factor in (0.1, 10.0):
        slower = msgspec.structs.replace(
            tight,
            links=tuple(
                msgspec.structs.replace(link, bytes_per_s=factor * link.bytes_per_s) for link in tight.links
            ),
        )
        plan = api.compile(
            deep_mlp(), slower, tmp_path / f"x{factor:g}", strategy=strategy, batch="global"
        ).plan
        change = change_of(what_if, "links", f"x{factor:g}")

        assert change.compiled is not None, change.not_priced
        assert change.compiled.step_s == plan.predicted_step_s


def _with_quick_links(cluster: Cluster) -> Cluster:
    """Return a cluster on whose links more micro-batches under way pay: messages are as short as segments."""
    links = tuple(msgspec.structs.replace(link, latency_s=1e-6) for link in cluster.links)
    return msgspec.structs.replace(cluster, links=links)


def test_what_cannot_be_priced_says_why(priced: tuple[Path, WhatIf]) -> None:
    _, what_if = priced
    spatial = next(c for c in what_if.changes if c.value.startswith("spatial"))
    fixed = import_training_graph(wide_mlp(batch=8))
    alone = with_hosts(read_cluster(Path(CLUSTER)), 1)

    assert spatial.compiled is None and "window" in spatial.not_priced
    reasons = {change.dimension: change.reason for change in list_changes(alone, Options(), fixed)}
    assert "partc grad --batch-size dynamic" in reasons["batch"]
    assert "no links" in reasons["links"]


def test_workers_without_a_common_step_are_refused(priced: tuple[Path, WhatIf], tmp_path: Path) -> None:
    train = priced[0] / "train.onnx"
    refused(
        "compile",
        train,
        "-c",
        CLUSTER,
        "-o",
        tmp_path / "o",
        "--what-if",
        "--asynchronous",
        fix="leave one of the two",
    )
