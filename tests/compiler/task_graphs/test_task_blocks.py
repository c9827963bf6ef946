"""What members of a communication do themselves, and when, as a plan's ranks do it."""

import numpy as np
import pytest

from partc.compiler.task_graphs.task_blocks import Draft, Ends, TaskBlock
from partc.compiler.task_graphs.task_prices import TaskPrices
from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster
from partc.cost.cluster.machines import Device, Host
from partc.cost.cluster.profiles import PER_COMMUNICATION_S, SLOT_S
from partc.cost.simulation.task_arrays import OWN
from partc.cost.simulation.task_graph import BlockTasks, TaskGraph
from partc.passes.scheduling.segment_work import Work

GPUS = tuple(Device(f"a/gpu{n}", "gpu", "titan-xp", index=n) for n in range(3))
FEW_LAUNCHES, MANY_LAUNCHES = (Work(10**9, 10**7, 10**6, nodes, 0) for nodes in (1, 200))


@pytest.fixture
def prices() -> TaskPrices:
    host = Host("a", GPUS, 2**38)
    return TaskPrices(Cluster(CLUSTER_FORMAT, "three GPUs of a host", (host,)))


def simulated(prices: TaskPrices, block: TaskBlock) -> tuple[TaskGraph, float]:
    graph = TaskGraph([[]], prices.resources, prices.launching(0))
    within = np.insert(block.pairs, 0, OWN, axis=1).astype(np.int32)
    graph.replace({0: BlockTasks(block.parts, block.resources, block.seconds, within)})
    return graph, graph.full()


@pytest.mark.parametrize("work", [FEW_LAUNCHES, MANY_LAUNCHES])
def test_what_begins_a_communication_takes_its_time_of_whichever_is_longer(
    prices: TaskPrices, work: Work
) -> None:
    """As in a plan: segment, beginning, segment, one after the other."""
    draft, price, members = Draft(prices), prices.work(work, 0), np.arange(3, dtype=np.int32)
    ends = Ends(3)
    for _ in range(4):
        tasks = draft.computing(members, price)
        draft.wait_for_ends(ends, members, tasks)
        draft.communicate(prices.collective("all_reduce", 1024, (0, 1, 2)), members, ends_of(members, tasks))
        ends.put(members, tasks + 3)  # the beginnings
    _, step_s = simulated(prices, draft.finish())

    summed_s = prices.collective("all_reduce", 1024, (0, 1, 2)).seconds
    assert step_s == pytest.approx(4 * (price.seconds.max() + PER_COMMUNICATION_S) + summed_s)


def ends_of(members: np.ndarray, tasks: np.ndarray) -> Ends:
    ends = Ends(3)
    ends.put(members, tasks)
    return ends


def test_who_only_receives_begins_when_the_senders_do(prices: TaskPrices) -> None:
    """A worker that will be sent something late has its device until then."""
    draft, late, now = Draft(prices), prices.work(MANY_LAUNCHES, 0), prices.work(FEW_LAUNCHES, 0)
    sender, others = np.array([0], np.int32), np.array([1, 2], np.int32)
    members = np.array([0, 1, 2], np.int32)
    ends = ends_of(sender, draft.computing(sender, late))
    moved = prices.exchange(np.array([0, 0], np.int32), np.array([1, 2], np.int32), np.full(2, 1000))
    sent = draft.communicate(moved, members, ends)
    computed = draft.computing(others, now)
    graph, _ = simulated(prices, draft.finish())

    end_s = graph.times(0).end
    assert end_s[computed] == pytest.approx(now.seconds[others])
    assert end_s[sent] == pytest.approx(late.seconds[0] + PER_COMMUNICATION_S + moved.seconds)
    assert (ends.indices >= 0).tolist() == [True, False, False], "the caller's ends are as before"


def test_messages_of_a_slot_begin_together(prices: TaskPrices) -> None:
    """Three messages to another worker, ready one shortly behind the other, and what is computed behind."""
    moved = prices.exchange(np.array([0], np.int32), np.array([1], np.int32), np.full(1, 1000))
    members, work = np.array([0, 1], np.int32), prices.work(FEW_LAUNCHES, 0)
    computing_s = float(work.seconds.max())
    draft = Draft(prices)
    for _ in range(3):
        sent = draft.communicate(moved, members, ends_of(members, draft.computing(members, work)), True)
    behind = draft.computing(members, work)
    draft.wait_for_ends(ends_of(members, np.full(2, sent, np.int32)), members, behind)
    graph, step_s = simulated(prices, draft.finish())

    begun_s = 3 * computing_s
    assert graph.times(0).end[sent] == pytest.approx(begun_s + SLOT_S / 2 + 2 * moved.seconds)
    assert step_s == pytest.approx(begun_s + SLOT_S / 2 + 2 * moved.seconds + computing_s)
