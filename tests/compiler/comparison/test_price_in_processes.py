"""Changes are priced alike in any number of processes, and none is lost with a process."""

import os
from functools import partial
from pathlib import Path

import pytest

from partc.compiler.comparison import price_changes
from partc.compiler.comparison.list_changes import list_changes
from partc.compiler.comparison.price_changes import PriceChanges
from partc.compiler.comparison.price_in_processes import price_in_processes
from partc.compiler.compilation import Compilation
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.options import Options
from partc.cost.cluster.cluster import read_cluster
from partc.cost.what_if import PricedChange
from tests.builders.plans.wide_mlp import wide_mlp
from tests.checks.command_line import CLUSTER

HERE = os.getpid()


def change(number: int) -> PricedChange:
    return PricedChange("hosts", str(number), f"by process {'here' if os.getpid() == HERE else 'there'}")


def end(number: int) -> PricedChange:
    if os.getpid() != HERE:
        os._exit(1)
    return change(number)


@pytest.mark.parametrize("processes", [1, 3])
def test_all_are_found_in_their_order(processes: int) -> None:
    told: list[int] = []

    found = price_in_processes([partial(change, number) for number in range(7)], told.append, processes)

    assert [priced.value for priced in found] == list("0123456")
    assert told == list(range(1, 8))
    assert {priced.meaning for priced in found} == {f"by process {'here' if processes == 1 else 'there'}"}


def test_what_a_killed_process_had_begun_is_priced_here() -> None:
    jobs = [partial(end if number == 2 else change, number) for number in range(5)]

    found = price_in_processes(jobs, lambda done: None, 2)

    assert [priced.value for priced in found] == list("01234")
    assert found[2].meaning == "by process here"


def test_what_is_quick_is_compiled_where_a_search_no_longer_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    training = import_training_graph(wide_mlp())
    cluster, options = read_cluster(Path(CLUSTER)), Options(sizes={"batch": 8})
    changes = list_changes(cluster, options, training)
    pricing = PriceChanges(lambda: training, cluster, options)
    compilation = Compilation(training, cluster, options)
    monkeypatch.setattr(price_changes, "COMPILED_NODES", 50 * len(training.graph.nodes))

    compiled = list(pricing._compiled(changes, compilation))

    strategies = [entry for entry in changes if entry.dimension == "strategy"]
    assert set(strategies) <= set(compiled)
    assert len([entry for entry in compiled if entry.dimension != "strategy"]) < len(changes) - len(
        strategies
    )
