import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partc.cost.assignment.greedy_assignment import Rows, place_longest_first
from partc.cost.assignment.row_spread import spread_of
from partc.cost.assignment.server_assignment import assign_to_servers
from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster
from partc.cost.cluster.machines import Device, Host, Link
from partc.cost.strategy import Shard, SyncFacts
from partc.runtime.errors import NoPlacement
from tests.builders.plans.compiled_steps import cluster_of

GiB = 2**30


def servers(*memory_bytes: int) -> Cluster:
    hosts = tuple(
        Host(f"h{i}", (Device(f"h{i}/gpu", "gpu", "v100"),), memory) for i, memory in enumerate(memory_bytes)
    )
    links = tuple(Link((host.name, "switch"), 1e9) for host in hosts)
    return Cluster(CLUSTER_FORMAT, "servers", hosts, ("switch",), links)


def variable(name: str, rows: int, row_bytes: int, slot_row_bytes: int = 0) -> SyncFacts:
    return SyncFacts(name, rows, row_bytes, slot_row_bytes, sparse=False, touched_rows=rows)


def covered_rows(shards: tuple[Shard, ...]) -> int:
    """Return the rows covered; fail at a gap or a host out of order."""
    row = 0
    for shard in shards:
        assert shard.start == row < shard.stop
        row = shard.stop
    assert [shard.host for shard in shards] == sorted(shard.host for shard in shards)
    return row


def test_a_large_table_is_split_evenly_over_all_servers() -> None:
    shards, assignment = assign_to_servers([variable("E", 800_000, 2048, 2048)], servers(*[64 * GiB] * 8))

    assert shards["E"] == tuple(Shard(f"h{i}", 100_000 * i, 100_000 * (i + 1)) for i in range(8))
    assert assignment.objective_bytes == assignment.bound_bytes == 100_000 * 4096
    assert assignment.status == "OPTIMAL"


def test_small_variables_stay_whole_and_fill_the_servers_evenly() -> None:
    facts = [variable(f"v{i}", 10, 100) for i in range(64)]

    shards, assignment = assign_to_servers(facts, servers(*[GiB] * 4))

    assert all(len(pieces) == 1 for pieces in shards.values())
    assert set(assignment.bytes_per_server.values()) == {16 * 1000}


def test_slots_count_as_stored_bytes() -> None:
    facts = [variable("adam", 1, 100, 200), *(variable(f"plain{i}", 1, 100) for i in range(3))]

    shards, assignment = assign_to_servers(facts, servers(GiB, GiB))

    alone = shards["adam"][0].host
    assert [name for name, pieces in shards.items() if pieces[0].host == alone] == ["adam"]
    assert assignment.bytes_per_server == {"h0": 300, "h1": 300}


def test_600_variables_on_8_servers_are_near_the_proven_bound_within_5_seconds() -> None:
    draw = random.Random(0)
    facts = [
        variable(f"v{i}", draw.randrange(1, 4000), draw.choice([4, 256, 2048, 4096]), draw.choice([0, 4096]))
        for i in range(600)
    ]
    began = time.monotonic()

    shards, assignment = assign_to_servers(facts, servers(*[64 * GiB] * 8))

    assert time.monotonic() - began < 5
    assert assignment.bound_bytes <= assignment.objective_bytes <= 1.01 * assignment.bound_bytes
    for fact in facts:
        assert covered_rows(shards[fact.name]) == fact.rows
    stored = sum(fact.rows * (fact.row_bytes + fact.slot_row_bytes) for fact in facts)
    assert sum(assignment.bytes_per_server.values()) == stored


def test_traffic_is_evened_too_where_stored_bytes_leave_the_choice() -> None:
    cold = SyncFacts("cold", 80_000, 64, 0, sparse=True, touched_rows=80)
    hot = SyncFacts("hot", 80_000, 64, 0, sparse=True, touched_rows=8_000)

    _, assignment = assign_to_servers([cold, hot], servers(*[GiB] * 8))

    moved = assignment.moved_bytes_per_server.values()
    assert max(moved) <= 1.3 * min(moved)


ZIPF = spread_of(
    np.bincount((np.exp(np.random.default_rng(0).random(100_000) * np.log(80_001)) - 1).astype(int))
)


def test_measured_traffic_is_cut_evenly_however_few_rows_a_server_then_stores() -> None:
    table = SyncFacts("E", 80_000, 64, 64, sparse=True, touched_rows=8_000, spread=ZIPF)

    shards, assignment = assign_to_servers([table], servers(*[GiB] * 4))

    moved = assignment.moved_bytes_per_server.values()
    assert covered_rows(shards["E"]) == 80_000
    assert max(moved) <= 1.05 * min(moved)
    assert shards["E"][0].stop < 100 and shards["E"][3].stop - shards["E"][3].start > 60_000


def test_measured_traffic_is_cut_as_evenly_as_memory_allows() -> None:
    table = SyncFacts("E", 80_000, 64, 64, sparse=True, touched_rows=8_000, spread=ZIPF)
    room = 35_000 * 128

    shards, assignment = assign_to_servers([table], servers(*[room] * 4))

    assert covered_rows(shards["E"]) == 80_000
    assert max(assignment.bytes_per_server.values()) <= room
    assert shards["E"][0].stop < 18_000


def test_a_smaller_server_takes_what_fits() -> None:
    shards, assignment = assign_to_servers([variable("E", 1000, 1000)], servers(100_000, 950_000))

    assert covered_rows(shards["E"]) == 1000
    assert assignment.bytes_per_server["h0"] == 100_000


def test_hosts_that_are_no_servers_own_nothing() -> None:
    hosts = tuple(Host(f"h{i}", (Device(f"h{i}/gpu", "gpu", "v100"),), GiB, server=i == 1) for i in range(2))
    cluster = Cluster(CLUSTER_FORMAT, "one server", hosts, links=(Link(("h0", "h1"), 1e9),))

    shards, _ = assign_to_servers([variable("E", 1000, 1000), variable("b", 1, 8)], cluster)

    assert {piece.host for pieces in shards.values() for piece in pieces} == {"h1"}


def test_pinned_shards_stay_and_the_others_even_them_out() -> None:
    pinned = {"E": (Shard("h0", 0, 1000),)}
    facts = [variable("E", 1000, 100), *(variable(f"v{i}", 100, 100) for i in range(10))]

    shards, assignment = assign_to_servers(facts, servers(GiB, GiB), pinned)

    assert shards["E"] == pinned["E"]
    assert assignment.bytes_per_server == {"h0": 100_000, "h1": 100_000}


def test_the_same_question_has_the_same_answer() -> None:
    facts = [variable(f"v{i}", 13 * i % 97 + 1, 64 + i) for i in range(50)]

    assert assign_to_servers(facts, servers(*[GiB] * 3)) == assign_to_servers(facts, servers(*[GiB] * 3))


# ---------------------------------------------------------------- what cannot fit


def test_one_row_larger_than_every_server_is_refused_by_name_need_room_and_change() -> None:
    with pytest.raises(NoPlacement) as caught:
        assign_to_servers([variable("b", 1, 10), variable("wide", 1, 5000)], servers(1000, 2000))

    assert "variable 'wide' needs 5000 bytes" in caught.value.what
    assert "'h1' has 2000" in caught.value.what
    assert caught.value.fix == "raise memory_bytes of host 'h1' by 3000"


def test_more_than_all_servers_hold_is_refused_with_the_shortfall() -> None:
    with pytest.raises(NoPlacement) as caught:
        assign_to_servers([variable("E", 100, 100), variable("b", 1, 500)], servers(4000, 5000))

    assert "need 10500 bytes" in caught.value.what
    assert "servers have 9000" in caught.value.what
    assert "'E'" in caught.value.at
    assert "by 1500 together" in caught.value.fix


def test_variables_are_split_where_whole_ones_would_not_fit() -> None:
    facts = [variable(f"v{i}", 6, 100) for i in range(15)]

    shards, _ = assign_to_servers(facts, servers(3000, 3000, 3000))
    tight, _ = assign_to_servers(facts, servers(2900, 2900, 3200))

    assert all(len(pieces) == 1 for pieces in shards.values())
    assert any(len(pieces) > 1 for pieces in tight.values())
    assert all(covered_rows(pieces) == 6 for pieces in tight.values())


def test_what_fits_in_sum_but_not_in_whole_rows_is_refused_with_a_change_that_suffices() -> None:
    facts = [variable(f"v{i}", 1, 600) for i in range(3)]

    with pytest.raises(NoPlacement) as caught:
        assign_to_servers(facts, servers(1000, 1000))

    assert "in pieces of up to 600" in caught.value.what
    assert caught.value.fix == "raise memory_bytes of every server by 600"
    assign_to_servers(facts, servers(1600, 1600))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 500), st.integers(0, 100)), min_size=1, max_size=12
    ),
    st.integers(1, 4),
    st.integers(0, 5000),
)
def test_every_row_has_one_owner_with_room_for_it_or_it_is_said_that_nothing_fits(
    shapes: list[tuple[int, int, int]], count: int, spare: int
) -> None:
    facts = [variable(f"v{i}", *shape) for i, shape in enumerate(shapes)]
    stored = sum(fact.rows * (fact.row_bytes + fact.slot_row_bytes) for fact in facts)
    room = stored // count + spare + 1

    try:
        shards, assignment = assign_to_servers(facts, servers(*[room] * count))
    except NoPlacement:
        assert spare < max(row_bytes + slot for _, row_bytes, slot in shapes)
        return

    assert all(covered_rows(shards[fact.name]) == fact.rows for fact in facts)
    assert max(assignment.bytes_per_server.values()) <= room
    assert assignment.bound_bytes <= assignment.objective_bytes


def test_the_greedy_start_places_every_row() -> None:
    items = [Rows("E", 1001, 8, 8, is_split=True), Rows("b", 3, 4, 4, is_split=False)]

    placed = place_longest_first(items, rooms=[10**6] * 3, most=0.5)

    assert [sum(rows) for rows in placed] == [1001, 3]
    assert sorted(placed[1]) == [0, 0, 3]


def test_traffic_of_less_than_a_byte_a_row_is_not_rounded_up() -> None:
    """A bias of 100,000 rows, of which 750 are touched, moves 0.03 bytes a row: 3,000 bytes in all."""
    bias = SyncFacts("bias", 100_000, 4, slot_row_bytes=4, sparse=True, touched_rows=750)
    weight = SyncFacts("weight", 1_000, 40, slot_row_bytes=0, sparse=False, touched_rows=1_000)
    cluster = cluster_of("2x2")

    shards, assignment = assign_to_servers([bias, weight], cluster)

    assert sum(assignment.moved_bytes_per_server.values()) == pytest.approx(3_000 + 40_000, abs=2)
    for host, moved in assignment.moved_bytes_per_server.items():
        rows = {name: sum(s.stop - s.start for s in own if s.host == host) for name, own in shards.items()}
        assert moved == pytest.approx(rows["bias"] * 0.03 + rows["weight"] * 40, abs=2)
