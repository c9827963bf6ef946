"""What if, and what a run measured, in a real browser: choices show the row that was priced, nothing else."""

from pathlib import Path

import msgspec
import pytest

from partc.compiler.comparison.compare_steps import compare_steps
from partc.compiler.comparison.draw_comparison import comparison_page
from partc.compiler.comparison.explain_run import explain_run
from partc.compiler.comparison.read_side import read_side, run_of
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.compiler.output.write_measured import write_measured
from partc.compiler.pipeline import COMPILE, run, write_plan
from partc.compiler.settle_options import begin_compilation
from partc.cost.cluster.cluster import read_cluster
from partc.cost.simulation.instruction_times import time_instructions
from partc.cost.what_if import WHAT_IF_FORMAT, PricedChange, PricedStep, WhatIf
from partc.runtime.execution.recorder import RankTimes
from partc.runtime.plan.plan_folder import read_plan_folder
from tests.builders.plans.wide_mlp import wide_mlp
from tests.checks.browser import Browser
from tests.checks.command_line import CLUSTER
from tests.checks.page_audit import NOTHING_WRONG, audit


def price(step_s: float) -> PricedStep:
    return PricedStep(step_s, 64, 64 / step_s, "host0 -> host1", 0.25, 10**7, 10**9)


PRICED = WhatIf(
    WHAT_IF_FORMAT,
    price(8e-3),
    "4 AllReduce",
    hosts=2,
    batch=16,
    changes=(
        PricedChange(
            "links", "x0.1", "every link at 0.1 times its rate", price(90e-3), price(40e-3), "4 Servers"
        ),
        PricedChange(
            "links", "x10", "every link at 10 times its rate", price(2e-3), price(2e-3), "4 AllReduce"
        ),
        PricedChange(
            "links",
            "x2",
            "every link at 2 times its rate",
            price(5e-3),
            not_priced="other changes came first",
        ),
        PricedChange(
            "links",
            "x5",
            "every link at 5 times its rate",
            price(3e-3),
            not_priced="other changes came first",
        ),
        PricedChange("strategy", "tensor=2", "--strategy tensor=2", None, price(5e-3), "data 2 x tensor 2"),
        PricedChange("strategy", "spatial=2", "--strategy spatial=2", not_priced="no windows"),
        PricedChange("strategy", "layerwise", "--strategy layerwise", not_priced="no windows"),
        PricedChange("hosts", "4", "4 hosts, the last one repeated", None, price(16e-3), "4 AllReduce"),
    ),
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of a plan of which changes were priced, and of which there was a run."""
    out = tmp_path_factory.mktemp("priced") / "out"
    cluster = read_cluster(Path(CLUSTER))
    options = Options(strategy="allreduce", sizes={"batch": 64})
    compilation = begin_compilation(import_training_graph(wide_mlp()), cluster, options)
    run(COMPILE, compilation)
    compilation.price_changes = lambda compiled: PRICED
    write_plan(compilation, out)
    folder = read_plan_folder(out)
    _, times = time_instructions(folder.plan, cluster)
    slow = {
        rank: msgspec.structs.replace(step, end_s=(*step.end_s[:-1], step.end_s[-1] + 9e-3))
        for rank, step in times.items()
    }
    explained = explain_run(folder, {rank: RankTimes(0.0, 0.0, (step,)) for rank, step in slow.items()})
    assert explained is not None
    write_measured(folder, explained)
    return out / "report.html"


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_nothing_is_wrong_with_both_sections(page: Path, browser: Browser, width: int, dark: bool) -> None:
    with browser.open(page, width, dark=dark) as shown:
        assert shown.evaluate("!!document.querySelector('#timeline + #measured svg')")
        assert shown.evaluate("document.querySelector('#measured .lead').textContent").startswith(
            "A step: predicted "
        )
        found = audit(shown)
        assert found == NOTHING_WRONG
        assert shown.errors == []


def test_choices_are_the_rows_that_were_priced_and_one_of_all(page: Path, browser: Browser) -> None:
    with browser.open(page, 1400) as shown:
        choices = "[...document.querySelectorAll('.choices fieldset')].map(f => f.textContent.trim())"
        labels = [" ".join(text.split()) for text in shown.evaluate(choices)]
        assert labels == [
            "Strategytensor=2this plan",
            "Rate of the linksx0.1this planx2x5x10",
            "Hoststhis plan4",
        ]

        choose = "[...document.querySelectorAll('.choices label')].find(l => l.textContent === '{}').click()"
        first_figure = "document.querySelector('.priced strong').textContent"
        assert plain(shown.evaluate(first_figure)) == "8.00 ms"
        shown.evaluate(choose.format("x0.1"))
        assert plain(shown.evaluate(first_figure)) == "40.0 ms"
        shown.evaluate(choose.format("4"))
        assert plain(shown.evaluate(first_figure)) == "16.0 ms"
        checked = "[...document.querySelectorAll('.choices :checked')].map(i => i.parentNode.textContent)"
        assert shown.evaluate(checked) == ["this plan", "this plan", "4"]
        assert shown.evaluate("document.querySelectorAll('tr.selected').length") == 1


def test_changes_without_a_price_for_one_reason_share_a_line(page: Path, browser: Browser) -> None:
    with browser.open(page, 1400) as shown:
        assert shown.text("#what-if .note") == "Not priced: spatial=2, layerwise: no windows."
        assert shown.evaluate("document.querySelectorAll('[data-dimension=strategy] tbody tr').length") == 2
        told = "Priced for this plan alone: x2, x5: other changes came first."
        assert (
            shown.text("#what-if").count("other changes came first")
            == shown.text("#what-if").count(told)
            == 1
        )
        assert "->" not in shown.text("#what-if")


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_a_plan_beside_its_run_on_a_page_says_where_it_scrolls(
    page: Path, browser: Browser, tmp_path: Path, width: int, dark: bool
) -> None:
    sides = read_side(page.parent), read_side(run_of(page.parent))
    compared = tmp_path / "compared.html"
    compared.write_text(comparison_page(compare_steps(*sides)), encoding="utf-8")

    with browser.open(compared, width, dark=dark) as shown:
        assert "->" not in shown.text("main")
        assert audit(shown) == NOTHING_WRONG
        assert shown.errors == []
        hints = "[...document.querySelectorAll('.scroll-hint')].map(hint => hint.checkVisibility())"
        scrolling = (
            "[...document.querySelectorAll('.scroll-hint')].map(hint => hint.previousElementSibling)"
            ".map(box => box.scrollWidth > box.clientWidth)"
        )
        assert shown.evaluate(hints) == shown.evaluate(scrolling)
        assert width > 400 or any(shown.evaluate(hints))
