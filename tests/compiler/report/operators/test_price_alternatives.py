"""What else operators could be: the one that was taken is among it, and prices follow shapes and links."""

import pytest

from partc.compiler.report.operators import find_alternatives as limits
from partc.compiler.report.operators.alternatives import Alternative
from partc.compiler.report.operators.find_alternatives import find_alternatives
from tests.compiler.report.operators.conftest import SIZES, Page

FLOAT, KEPT = 4, 3  # bytes; a parameter, and two moments of Adam


@pytest.fixture(scope="module")
def of_groups(mesh_page: Page) -> tuple[tuple[Alternative, ...], ...]:
    return find_alternatives(mesh_page.compilation).of_groups


def test_what_was_taken_is_told_once_among_different_ones(
    of_groups: tuple[tuple[Alternative, ...], ...],
) -> None:
    taken = [[each.split for each in own if each.taken] for own in of_groups]

    rows, columns = (("batch", 2), ("in:0:1", 2)), (("batch", 2), ("out:1", 2))
    whole = (("batch", 2),)  # the last: too light to send for
    assert taken == [[columns], [rows], [whole]]
    for own in of_groups:
        assert len({each.split for each in own}) == len(own) > 3
        assert () in {each.split for each in own}  # whole, on one device


def test_variables_take_the_bytes_of_their_parts(of_groups: tuple[tuple[Alternative, ...], ...]) -> None:
    features, hidden, _, _ = SIZES
    first = {each.split: each for each in of_groups[0]}
    parameters = features * hidden + hidden

    assert first[()].memory_bytes == pytest.approx(FLOAT * KEPT * parameters, rel=0.01)
    assert first[(("out:1", 4),)].memory_bytes == pytest.approx(FLOAT * KEPT * parameters / 4, rel=0.01)
    assert first[(("batch", 4),)].memory_bytes == first[()].memory_bytes


def test_gradients_cost_what_their_sums_over_the_network_do(
    of_groups: tuple[tuple[Alternative, ...], ...],
) -> None:
    second = {each.split: each for each in of_groups[1]}
    link_s = FLOAT * SIZES[1] * SIZES[2] / 125e6  # the weight once over a link between hosts

    assert second[(("batch", 4),)].updating_s > link_s
    assert second[(("out:1", 4),)].updating_s < link_s  # each keeps its columns, and sums nothing


def test_a_batch_per_replica_leaves_nothing_to_choose(server_page: Page) -> None:
    found = find_alternatives(server_page.compilation)

    assert found.of_groups == ()
    assert "--batch global" in found.why_none


def test_the_page_says_above_the_drawing_why_prices_are_missing(server_page: Page, mesh_page: Page) -> None:
    def lead(page: Page) -> str:
        return page.report.read_text().partition('<section id="graph">')[2].partition("<noscript>")[0]

    assert "--batch global lets operators be split" in lead(server_page)
    assert '<p class="note">' not in lead(mesh_page)


@pytest.mark.parametrize(("limit", "told"), [("MOST_NODES", "nodes"), ("MOST_WORKERS", "4 workers")])
def test_of_large_steps_the_limit_is_told(
    mesh_page: Page, monkeypatch: pytest.MonkeyPatch, limit: str, told: str
) -> None:
    monkeypatch.setattr(limits, limit, 3)

    found = find_alternatives(mesh_page.compilation)

    assert found.of_groups == ()
    assert told in found.why_none and "more than 3" in found.why_none and "partc search" in found.why_none
