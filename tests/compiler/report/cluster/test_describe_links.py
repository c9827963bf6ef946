"""Bytes of links, held to sums over the instructions of plan.json that this file makes on its own."""

import json
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.report import units
from partc.compiler.report.cluster.describe_links import describe_links, loads_of
from partc.compiler.report.measure_traffic import step_traffic
from partc.cost.cluster.cluster import Cluster
from partc.cost.strategy import Mode
from partc.models.catalogue import build_model
from partc.runtime.plan.program import Start
from tests.builders.plans.compiled_reports import Compiled, TextReader, compile_lm, plain
from tests.builders.plans.compiled_steps import compile_step

Json = dict[str, Any]


def between_two_hosts(folder: Path) -> Counter[tuple[str, str]]:
    """Return what each direction of the link between two hosts carries, from plan.json alone.

    Two that sum a whole value each send it once, whichever way they do it, and so do two hosts' workers where
    it is short. Of a value in regions each sends the other what it wants; of rows a half goes to either of
    the servers.
    """
    plan = json.loads((folder / "plan.json").read_text())
    hosts = {rank["rank"]: rank["host"] for rank in plan["ranks"]}
    sent: Counter[tuple[str, str]] = Counter()
    for start in (i for i in plan["instructions"] if i["type"] == "start"):
        for members in plan["groups"][start["group"]]:
            if len({hosts[member] for member in members}) == 2:
                sent += messages(start, [hosts[member] for member in members])
    return sent


def messages(start: Json, hosts: list[str]) -> Counter[tuple[str, str]]:
    payload, kind = start["payload_bytes"], start["kind"]
    if kind == "exchange":
        return exchanged(start["exchange"], hosts)
    if kind == "all_gather_rows":  # short ones double: members exchange all that they have
        assert len(hosts) in (2, 4) and payload * len(hosts) < 512 * 1024, (hosts, payload)
        doubled: Counter[tuple[str, str]] = Counter()
        for apart in (1, 2)[: len(hosts) // 2]:
            for position, host in enumerate(hosts):
                if host != (other := hosts[position ^ apart]):
                    doubled[host, other] += apart * payload
        return doubled
    if kind == "all_reduce" and len(hosts) == 4:
        one, other = hosts[0], hosts[2]
        return Counter({(one, other): payload, (other, one): payload})
    one, other = hosts  # members
    there, back = (one, other), (other, one)
    if kind == "all_reduce":
        return Counter({there: payload, back: payload})
    if kind in ("broadcast", "shift_ahead"):
        return Counter({there: payload})
    if kind == "shift_back":
        return Counter({back: payload})
    if kind in ("reduce_scatter", "all_gather"):
        first, second = start.get("counts") or (1, 1)
        of_first, of_second = (payload * part / (first + second) for part in (first, second))
        sums = kind == "reduce_scatter"
        return Counter({there: of_second if sums else of_first, back: of_first if sums else of_second})
    assert kind == "all_to_all_rows", kind
    return Counter({there: payload / 2, back: payload / 2})


def exchanged(exchange: Json, hosts: list[str]) -> Counter[tuple[str, str]]:
    size = {"float32": 4, "int64": 8}[exchange["dtype"]]
    sent: Counter[tuple[str, str]] = Counter()
    for move in exchange["moves"]:
        source, target = hosts[move["source"]], hosts[move["target"]]
        if source != target:
            lengths = (sum(stop - start for start, stop in axis) for axis in move["region"])
            sent[source, target] += prod(lengths) * size
    return sent


def check(folder: Path, compiled: Compiled) -> None:
    step_s = compiled.compilation.timeline.step_s
    expected = between_two_hosts(folder)

    loads = loads_of(step_traffic(compiled.compilation.plan, compiled.cluster, {}), compiled.cluster, step_s)
    told = describe_links(loads)

    assert expected
    for link in compiled.cluster.links:
        for lane in (link.ends, link.ends[::-1]):
            nbytes = sum(of for way, of in expected.items() if lane in passed(way, compiled.cluster))
            assert loads.of_lane[lane].bytes == pytest.approx(nbytes, rel=1e-9)
            assert loads.share(lane) == pytest.approx(nbytes / link.bytes_per_s / step_s, rel=1e-9)
    most = max(expected.values())
    text = TextReader.read((folder / "report.html").read_text())
    assert plain(units.size(most)) in told.sentences[0].replace(units.NO_BREAK, " ")
    assert plain(told.sentences[0]) in text


def passed(way: tuple[str, str], cluster: Cluster) -> list[tuple[str, str]]:
    """Return what a message from host to host passes: their link, or those to the one switch."""
    source, target = way
    return [(source, cluster.switches[0]), (cluster.switches[0], target)] if cluster.switches else [way]


@pytest.mark.parametrize("strategy", ["auto", "ps"])
def test_bytes_between_hosts_are_the_sums_over_instructions(
    all_compiled: dict[str, Compiled], strategy: Mode, tmp_path: Path
) -> None:
    compiled = (
        all_compiled["cluster-2x2"]
        if strategy == "auto"
        else compile_lm("cluster-2x2", tmp_path / "out", strategy)
    )

    check(compiled.folder, compiled)


@pytest.mark.parametrize("strategy", ["tensor=2,data=2", "pipeline=2,microbatches=4"])
def test_bytes_between_hosts_of_meshes_are_the_sums_over_instructions(strategy: str, tmp_path: Path) -> None:
    forward = build_model("mlp", sizes=(16, 32, 8), batch=16)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))
    made = compile_step(import_training_graph(step), tmp_path / "out", "2x2", strategy, "global")
    compiled = Compiled(made.compilation, made.compilation.cluster, made.folder.path)

    check(compiled.folder, compiled)


def test_what_a_link_carries_is_told_by_communication(all_compiled: dict[str, Compiled]) -> None:
    compiled = all_compiled["cluster-2x2"]
    starts = [(n, i) for n, i in enumerate(compiled.compilation.plan.instructions) if isinstance(i, Start)]

    traffic = step_traffic(
        compiled.compilation.plan, compiled.cluster, {n: f"{i.kind} {n}" for n, i in starts}
    )

    ends = compiled.cluster.links[0].ends
    one_by_one = {load.lane: load.bytes for load in traffic.lanes}
    told = traffic.contents[ends]
    assert [nbytes for _, nbytes in told] == sorted((nbytes for _, nbytes in told), reverse=True)
    assert 0.5 * one_by_one[ends] < sum(nbytes for _, nbytes in told) <= one_by_one[ends] * (1 + 1e-9)
    rows = dict(told)
    for number, start in starts:
        name = f"{start.kind} {number}"
        if name in rows and start.kind == "all_gather_rows":  # two of a host send two parts each
            assert rows[name] == pytest.approx(4 * start.payload_bytes)
    assert any(name.startswith("all_gather_rows") for name in rows)


def test_a_direction_without_load_is_there_and_says_so(all_compiled: dict[str, Compiled]) -> None:
    alone = all_compiled["cluster-1x4"]

    loads = loads_of(step_traffic(alone.compilation.plan, alone.cluster, {}), alone.cluster, 1.0)

    assert describe_links(loads).between == ()
    assert "the memory of host0" in describe_links(loads).sentences[0]


def test_alike_links_share_a_line_that_names_them_all(all_compiled: dict[str, Compiled]) -> None:
    ten = all_compiled["ten hosts"]

    loads = loads_of(step_traffic(ten.compilation.plan, ten.cluster, {}), ten.cluster, 1.0)
    told = describe_links(loads)

    assert len(told.between) < 20
    names = {name for row in told.between for name in (row.name, *row.alike)}
    assert names == {f"{a} → {b}" for link in ten.cluster.links for a, b in (link.ends, link.ends[::-1])}
