"""Traces of a plan and of a real run on 2 hosts x 2 workers, as a viewer would read them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from partc.compiler.traces.write_traces import measured_bars
from partc.cost.cluster.cluster import read_cluster
from partc.cost.simulation.timeline import simulate
from partc.runtime.execution.recorder import RankTimes, StepTimes
from partc.runtime.plan.plan_folder import read_plan_folder
from partc.runtime.plan.program import Plan, Start, instructions_of
from tests.checks.command_line import CLUSTER, done, partc, refused
from tests.checks.trace_event_rules import process_names, read_trace, thread_names

LM = ("vocab=300", "embedding=8", "cells=8", "projection=8", "batch=2", "steps=3", "samples=16")


@dataclass(frozen=True)
class Traced:
    plan: Plan
    out: Path
    predicted: list[dict[str, Any]]
    run: list[dict[str, Any]]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = tmp_path_factory.mktemp("traces")
    options = [word for option in LM for word in ("--set", option)]
    done("model", "lm", *options, "-o", folder / "forward.onnx")
    done("grad", folder / "forward.onnx", "--loss", "loss", "-o", folder / "train.onnx")
    out = folder / "out"
    done("compile", folder / "train.onnx", "-c", CLUSTER, "--strategy", "hybrid", "-o", out)
    done("simulate", out, "--trace", folder / "predicted.json")
    done("run", out, "--steps", 4, "--trace", folder / "run.json", "--trace-steps", 2)
    return Traced(
        read_plan_folder(out).plan,
        out,
        read_trace(folder / "predicted.json"),
        read_trace(folder / "run.json"),
    )


def bars(events: list[dict[str, Any]], process: str, thread: str) -> list[dict[str, Any]]:
    pid, threads = process_names(events)[process], thread_names(events)
    return [e for e in events if e["ph"] == "X" and e["pid"] == pid and threads[e["tid"]].startswith(thread)]


def test_a_run_lies_beside_its_prediction_rank_by_rank(traced: Traced) -> None:
    names = list(process_names(traced.run))

    assert names == [
        f"rank {rank.rank} {rank.device}: {side}"
        for rank in traced.plan.ranks
        for side in ("predicted", "measured")
    ]


def test_the_prediction_in_a_run_is_the_one_that_simulate_writes(traced: Traced) -> None:
    process = "rank 2 host1/cpu0: predicted"
    for thread in ("step", "compute", "communication"):
        alone, beside = bars(traced.predicted, process, thread), bars(traced.run, process, thread)
        assert alone
        assert [(e["name"], e["ts"], e["dur"]) for e in alone] == [
            (e["name"], e["ts"], e["dur"]) for e in beside
        ]


def test_every_rank_shows_every_instruction_of_the_last_steps(traced: Traced) -> None:
    for rank in traced.plan.ranks:
        process = f"rank {rank.rank} {rank.device}: measured"
        program = instructions_of(traced.plan, rank)
        kinds = [event["cat"] for event in bars(traced.run, process, "compute")]
        assert kinds == [type(i).__name__.lower() for i in program] * 2
        assert [e["name"] for e in bars(traced.run, process, "step")] == ["step 3", "step 4"]


def test_chosen_steps_alone_are_shown(traced: Traced, tmp_path: Path) -> None:
    done("run", traced.out, "--steps", 6, "--trace", tmp_path / "run.json", "--trace-steps", "2-3,5")

    events = read_trace(tmp_path / "run.json")
    for rank in traced.plan.ranks:
        steps = bars(events, f"rank {rank.rank} {rank.device}: measured", "step")
        assert [step["name"] for step in steps] == ["step 2", "step 3", "step 5"]
    traces = ("run", traced.out, "--steps", 6, "--trace", tmp_path / "run.json", "--trace-steps")
    refused(*traces, "5-8", what="steps 5 to 8", at="--trace-steps", fix="choose among these")
    refused(
        *traces, "5-3", what="'5-3' are no steps", at="--trace-steps", fix="write --trace-steps 100-105,500"
    )


def test_communications_have_the_names_of_the_plan_on_both_sides(traced: Traced) -> None:
    rank = traced.plan.ranks[0]
    labels = {i.label or i.kind for i in instructions_of(traced.plan, rank) if isinstance(i, Start)}
    for side in ("predicted", "measured"):
        shown = bars(traced.run, f"rank 0 {rank.device}: {side}", "communication")
        assert {event["name"] for event in shown} == labels


def test_nobody_has_a_sum_before_the_last_member_has_begun_it(traced: Traced) -> None:
    """The clocks of the ranks agree: the end on one rank is after the beginnings on all."""
    for start in (i for i in traced.plan.instructions if isinstance(i, Start) and i.kind == "all_reduce"):
        members = traced.plan.groups[start.group][0]
        of_members = [
            [
                event
                for event in bars(traced.run, f"rank {m} {traced.plan.ranks[m].device}: measured", "comm")
                if event["name"] == start.label and event["args"]["kind"] == "all_reduce"
            ]
            for m in members
        ]
        for same_step in zip(*of_members, strict=True):
            begun = max(event["ts"] for event in same_step)
            assert all(event["ts"] + event["dur"] >= begun for event in same_step)


def test_sent_bytes_are_those_of_the_plan_where_values_are_dense(traced: Traced) -> None:
    kinds = ("reduce", "all_reduce")
    dense = {i.label: i for i in traced.plan.instructions if isinstance(i, Start) and i.kind in kinds}
    seen = 0
    for rank in traced.plan.ranks:
        for event in bars(traced.run, f"rank {rank.rank} {rank.device}: measured", "communication"):
            if event["args"]["kind"] in kinds and (start := dense.get(event["name"])):
                assert event["args"]["bytes"] == start.payload_bytes
                seen += 1
    assert seen


def test_offsets_bring_the_clocks_of_hosts_together(traced: Traced) -> None:
    plan = traced.plan

    def times(begin_s: float, offset_s: float, rank: int) -> RankTimes:
        count = len(instructions_of(plan, plan.ranks[rank]))
        moments = tuple(begin_s + i for i in range(count))
        step = StepTimes(1, moments, tuple(m + 0.5 for m in moments), (0,) * count)
        return RankTimes(offset_s, 0.0, (step,))

    clocks = {r.rank: 100.0 * r.rank for r in plan.ranks}
    found = measured_bars(plan, {r: times(7 + ahead, -ahead, r) for r, ahead in clocks.items()})

    assert {bar.begin_s for bar in found if bar.category == "step"} == {0.0}


# ---------------------------------------------------------------- partc simulate


def test_simulate_tells_step_bytes_and_the_busiest_link(traced: Traced) -> None:
    shown = done("simulate", traced.out)

    timeline = simulate(traced.plan, read_cluster(traced.out / "cluster.json"))
    assert timeline.step_s == traced.plan.predicted_step_s
    assert "busiest link: host" in shown
    for title in ("step: ", "sends", "receives", "host0", "host1", "in", "out"):
        assert title in shown


def test_simulate_says_how_to_open_the_trace() -> None:
    shown = " ".join(done("simulate", "--help").split())

    assert "ui.perfetto.dev" in shown and "chrome://tracing" in shown


def test_a_cluster_with_slower_links_takes_longer(traced: Traced, tmp_path: Path) -> None:
    cluster = read_cluster(Path(CLUSTER))
    (link,) = cluster.links
    slow = msgspec.structs.replace(cluster, links=(msgspec.structs.replace(link, bytes_per_s=1e5),))
    (tmp_path / "slow.json").write_bytes(msgspec.json.encode(slow))
    told = done("simulate", traced.out, "-c", tmp_path / "slow.json", "--trace", tmp_path / "t.json")

    assert "busiest link: host" in told
    (step, *_) = [e for e in read_trace(tmp_path / "t.json") if e["name"] == "step"]
    assert step["dur"] / 1e6 > 2 * traced.plan.predicted_step_s


def test_a_cluster_of_other_devices_is_refused(traced: Traced) -> None:
    refused(
        "simulate", traced.out, "-c", CLUSTER.replace("2x2", "1x4"),
        what="ranks", at="cluster-1x4.json", fix="compile for this cluster",
    )  # fmt: skip


def test_a_trace_cannot_be_a_folder(traced: Traced, tmp_path: Path) -> None:
    refused("run", traced.out, "--steps", 1, "--trace", tmp_path, what="folder", fix="name a file")
    assert partc("simulate", traced.out, "--trace", tmp_path).code == 2
