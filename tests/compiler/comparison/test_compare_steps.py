"""`partc compare`: two plans, a plan and itself, a plan and its run; what is told is what the plans say."""

from pathlib import Path

import msgspec
import pytest

from partc.compiler import api
from partc.cost.comparison import Comparison
from partc.cost.step_account import MeasuredRun
from partc.runtime.plan.plan_folder import read_plan_folder
from tests.builders.plans.wide_mlp import wide_mlp
from tests.checks.command_line import CLUSTER, done, refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    for strategy in ("allreduce", "ps", "tensor=4"):
        api.compile(wide_mlp(), CLUSTER, folder / strategy, strategy=strategy, sizes={"batch": 32})
    done("run", folder / "allreduce", "--steps", 6)
    return folder


def compared(*arguments: object) -> Comparison:
    return msgspec.json.decode(done("compare", *arguments, "--json"), type=Comparison)


def check_sum(comparison: Comparison) -> None:
    total_s = comparison.after.account.step_s - comparison.before.account.step_s
    assert sum(difference.seconds for difference in comparison.differences) == pytest.approx(total_s)


def test_two_plans_differ_in_what_their_strategies_say(folder: Path) -> None:
    comparison = compared(folder / "allreduce", folder / "ps")

    check_sum(comparison)
    one, other = (read_plan_folder(folder / name).plan for name in ("allreduce", "ps"))
    assert comparison.before.account.step_s == pytest.approx(one.predicted_step_s)
    assert comparison.after.account.step_s == pytest.approx(other.predicted_step_s)
    methods = {v.name: (a.method, v.method) for a, v in zip(one.variables, other.variables, strict=True)}
    moved = {name: (entry.before, entry.after) for entry in comparison.variables for name in entry.names}
    parameters = {v.name for v in one.variables if v.role == "parameter"}
    assert parameters <= moved.keys()
    assert all(methods[name] == ("all_reduce", "servers") for name in parameters)
    assert all(moved[name][0] == "AllReduce, whole on 4\u00a0ranks" for name in parameters)
    assert all(moved[name][1].startswith("Servers, ") for name in parameters)


def test_the_other_way_round_everything_is_the_other_way_round(folder: Path) -> None:
    there, back = (
        compared(*pair)
        for pair in ((folder / "ps", folder / "tensor=4"), (folder / "tensor=4", folder / "ps"))
    )

    check_sum(there)
    assert {(d.kind, d.what): d.seconds for d in there.differences} == {
        (d.kind, d.what): -d.seconds for d in back.differences
    }
    assert {(m.before, m.after): m.names for m in there.operators} == {
        (m.after, m.before): m.names for m in back.operators
    }
    assert there.operators  # tensor=4 splits weights
    assert "A trains 128 samples a step, B 32" in there.reason


def test_a_plan_and_itself_differ_in_nothing(folder: Path) -> None:
    comparison = compared(folder / "ps", folder / "ps")

    assert comparison.reason == "both take as long"
    assert all(difference.seconds == 0 for difference in comparison.differences)
    assert comparison.variables == comparison.operators == ()
    assert all(amount.before_bytes == amount.after_bytes for amount in comparison.links)


def test_a_plan_is_compared_with_its_last_run(folder: Path, tmp_path: Path) -> None:
    run = msgspec.json.decode((folder / "allreduce" / "measured.json").read_bytes(), type=MeasuredRun)

    comparison = compared(folder / "allreduce")
    shown = done("compare", folder / "allreduce", "--html", tmp_path / "page.html")

    check_sum(comparison)
    assert comparison.after.kind == "measured"
    assert comparison.after.account == run.measured
    assert comparison.differences == run.differences
    assert comparison.variables == ()
    sent = [difference.what for difference in run.differences if difference.kind == "transfer"]
    assert sent and all(" the gradients of layer0.weight, " in what for what in sent)
    page = (tmp_path / "page.html").read_text()
    assert "On the critical path" in shown and "On the critical path" in page and "://" not in page


def test_without_a_run_of_this_plan_nothing_is_compared(folder: Path, tmp_path: Path) -> None:
    refused("compare", folder / "ps", what="no run of it was measured", fix="train it with `partc run")
    (folder / "ps" / "measured.json").write_bytes((folder / "allreduce" / "measured.json").read_bytes())
    try:
        refused("compare", folder / "ps", what="a run of another plan", fix="run the plan again")
    finally:
        (folder / "ps" / "measured.json").unlink()
    refused("compare", tmp_path, folder / "ps", fix="partc compile -o")


def test_a_run_tells_and_keeps_why_it_took_so_long_and_leaves_the_plan_as_it_is(folder: Path) -> None:
    out = folder / "allreduce"
    before = (out / "plan.json").read_bytes()
    shown = done("run", out, "--steps", 4)

    run = msgspec.json.decode((out / "measured.json").read_bytes(), type=MeasuredRun)
    last = shown.strip().splitlines()[-1]
    assert last.startswith("a step: predicted ") and ", measured " in last
    assert " in steps 1 to 4, " in last
    assert not run.reason or last.endswith(f"because {run.reason}")
    assert (run.first_step, run.last_step) == (1, 4)
    assert (out / "plan.json").read_bytes() == before
    read_plan_folder(out)
    page = (out / "report.html").read_text()
    assert page.count('<section id="measured">') == 1  # of two runs the last one's
    assert page.index('id="timeline"') < page.index('id="measured"') < page.index('id="devices"')
    assert 'id="measured"' not in (folder / "ps" / "report.html").read_text()
