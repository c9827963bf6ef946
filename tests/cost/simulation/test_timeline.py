import random
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster, groups_of, ranks_of, read_cluster
from partc.cost.cluster.machines import Device, Host, Link
from partc.cost.cluster.profiles import OVERSUBSCRIBED_WAIT_S, PER_COMMUNICATION_S
from partc.cost.simulation.memory import memory_of
from partc.cost.simulation.process_memory import PROCESS_BYTES
from partc.cost.simulation.timeline import Event, Measured, Timeline, simulate
from partc.runtime.plan.boxes import rows_box
from partc.runtime.plan.program import (
    PLAN_FORMAT,
    Buffer,
    Exchange,
    Instruction,
    Kind,
    Move,
    Plan,
    Rank,
    Run,
    Slice,
    Start,
    Wait,
)
from partc.runtime.plan.variables import Constant, PlanVariable, VariablePiece

EXAMPLES = Path(__file__).parents[3] / "examples"
TWO_BY_TWO = read_cluster(EXAMPLES / "cluster-2x2.json")
FLOPS_OF_A_SECOND = 90 * 10**9  # of the profile cpu-core


def plan_of(cluster: Cluster, *instructions: Instruction) -> Plan:
    groups = groups_of(cluster)
    ranks = tuple(
        Rank(
            rank=placed.rank,
            host=placed.host,
            device=placed.device,
            kind=placed.kind,
            device_index=placed.device_index,
            threads=placed.threads,
            sites=placed.sites,
            replica=placed.replica,
            groups={
                name: number
                for name, instances in groups.items()
                for number, members in enumerate(instances)
                if placed.rank in members
            },
            constants={},
            slices=(),
            pieces=(),
        )
        for placed in ranks_of(cluster)
    )
    return Plan(
        format=PLAN_FORMAT,
        model="model.onnx",
        batch="global",
        replicas=sum(rank.replica is not None for rank in ranks),
        sizes={},
        groups={name: tuple(instances) for name, instances in groups.items()},
        loss=None,
        ranks=ranks,
        instructions=instructions,
        buffers=(),
        slices=(),
        variables=(),
        data_inputs=(),
        outputs=(),
        predicted_step_s=0.0,
        cost_cache_sha256="",
        files={},
    )


def compute(seconds: float) -> Run:
    flops = round(seconds * FLOPS_OF_A_SECOND)
    return Run("worker", "segments/0123456789ab.onnx", reads=(), writes=(), flops=flops)


def start(tag: int, payload_bytes: int, kind: Kind = "all_reduce", group: str = "leaders") -> Start:
    return Start(tag, kind, group, "worker", "worker", ("g",), ("g",), payload_bytes=payload_bytes)


def events(timeline: Timeline, rank: int, lane: str) -> list[Event]:
    return [event for event in timeline.events if event.rank == rank and event.lane == lane]


# 125 MB ring-reduced by two hosts at 125 MB/s take a second, and two messages' latency.
SECOND_ON_THE_WIRE = 125_000_000


def test_computing_takes_what_the_roofline_says() -> None:
    by_memory = Run("worker", "segments/s.onnx", (), (), flops=1, touched_bytes=20 * 10**9)

    assert simulate(plan_of(TWO_BY_TWO, compute(2.0)), TWO_BY_TWO).step_s == pytest.approx(2.0, rel=1e-4)
    assert simulate(plan_of(TWO_BY_TWO, by_memory), TWO_BY_TWO).step_s == pytest.approx(1.0, rel=1e-4)


def test_communication_overlaps_with_computing_until_the_wait() -> None:
    overlapped = (start(0, SECOND_ON_THE_WIRE), compute(0.6), Wait(0), compute(0.2))
    serial = (start(0, SECOND_ON_THE_WIRE), Wait(0), compute(0.6), compute(0.2))

    assert simulate(plan_of(TWO_BY_TWO, *overlapped), TWO_BY_TWO).step_s == pytest.approx(1.2, rel=1e-3)
    assert simulate(plan_of(TWO_BY_TWO, *serial), TWO_BY_TWO).step_s == pytest.approx(1.8, rel=1e-3)


def test_two_communications_of_a_rank_follow_each_other() -> None:
    plan = plan_of(TWO_BY_TWO, start(0, SECOND_ON_THE_WIRE), start(1, SECOND_ON_THE_WIRE), Wait(0), Wait(1))

    first, second = events(simulate(plan, TWO_BY_TWO), rank=0, lane="communication")

    assert first.stop_s == pytest.approx(1.0, rel=1e-3)
    assert second.start_s == pytest.approx(first.stop_s)
    assert second.stop_s == pytest.approx(2.0, rel=1e-3)


def test_members_wait_for_the_slowest_of_them() -> None:
    slow = msgspec.structs.replace(compute(1.0), site="server")  # ranks 0 and 2 only

    timeline = simulate(plan_of(TWO_BY_TWO, slow, start(0, 8, group="workers"), Wait(0)), TWO_BY_TWO)

    assert events(timeline, rank=1, lane="compute") == []
    assert events(timeline, rank=1, lane="communication")[0].start_s == pytest.approx(1.0, rel=1e-3)


def test_groups_of_different_hosts_communicate_at_the_same_time() -> None:
    local = start(0, 10**9, kind="reduce", group="host_workers")

    timeline = simulate(plan_of(TWO_BY_TWO, local, Wait(0)), TWO_BY_TWO)

    assert len({event.start_s for event in timeline.events}) == 1
    assert len(timeline.events) == 4


def test_bytes_on_the_wire_are_counted_by_rank_and_direction() -> None:
    timeline = simulate(plan_of(TWO_BY_TWO, start(0, 1000)), TWO_BY_TWO)

    assert timeline.sent_bytes == {0: 1000, 1: 0, 2: 1000, 3: 0}
    assert timeline.received_bytes == {0: 1000, 1: 0, 2: 1000, 3: 0}


ROW_KINDS: tuple[tuple[Kind, str, dict[int, int], dict[int, int]], ...] = (
    # One GPU on each of two hosts: ranks 0 and 1; their servers are ranks 2 and 3.
    ("gather_rows", "host", {0: 100, 1: 100, 2: 0, 3: 0}, {0: 0, 1: 0, 2: 100, 3: 100}),
    ("all_gather_rows", "workers", {0: 100, 1: 100, 2: 0, 3: 0}, {0: 100, 1: 100, 2: 0, 3: 0}),
)


@pytest.mark.parametrize(("kind", "group", "sent", "received"), ROW_KINDS, ids=[row[0] for row in ROW_KINDS])
def test_only_senders_contribute_rows(
    kind: Kind, group: str, sent: dict[int, int], received: dict[int, int]
) -> None:
    cluster = one_gpu_each()

    timeline = simulate(plan_of(cluster, start(0, 100, kind=kind, group=group)), cluster)

    assert timeline.sent_bytes == sent
    assert timeline.received_bytes == received
    assert {event.rank: event.payload_bytes for event in timeline.events}.get(2, 0) == 0


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("scatter_rows", 100), ("all_to_all_rows", 50), ("reduce_scatter", 50), ("all_gather", 50)],
)
def test_servers_send_to_their_receivers(kind: Kind, sent: int) -> None:
    cluster = one_gpu_each()
    group = "host" if kind == "scatter_rows" else "servers"
    receivers = "worker" if kind == "scatter_rows" else "server"
    instruction = msgspec.structs.replace(
        start(0, 100, kind=kind, group=group), senders="server", receivers=receivers
    )

    timeline = simulate(plan_of(cluster, instruction), cluster)

    assert timeline.sent_bytes == {0: 0, 1: 0, 2: sent, 3: sent}


def one_gpu_each() -> Cluster:
    hosts = tuple(Host(f"h{i}", (Device(f"h{i}/gpu", "gpu", "titan-xp"),), 2**34) for i in range(2))
    return Cluster(CLUSTER_FORMAT, "one GPU each", hosts, links=(Link(("h0", "h1"), 1e9, 1e-5),))


def test_uneven_counts_make_uneven_regions() -> None:
    scattered = msgspec.structs.replace(
        start(0, 400, kind="reduce_scatter", group="servers"),
        senders="server",
        receivers="server",
        counts=(3, 1),
    )

    timeline = simulate(plan_of(TWO_BY_TWO, scattered), TWO_BY_TWO)

    assert timeline.received_bytes == {0: 300, 1: 0, 2: 100, 3: 0}


def test_one_thread_is_slower_where_a_segment_asks_for_it() -> None:
    devices = tuple(msgspec.structs.replace(device, threads=2) for device in TWO_BY_TWO.hosts[0].devices)
    hosts = (msgspec.structs.replace(TWO_BY_TWO.hosts[0], devices=devices),)
    cluster = msgspec.structs.replace(TWO_BY_TWO, hosts=hosts, links=())

    both = simulate(plan_of(cluster, compute(1.0)), cluster).step_s
    one = simulate(plan_of(cluster, msgspec.structs.replace(compute(1.0), one_thread=True)), cluster).step_s

    assert one == pytest.approx(2 * both, rel=1e-3)


@pytest.mark.parametrize(("cores", "slower"), [(None, 1.0), (2.0, 1.0), (8.0, 1.0), (1.0, 2.0), (0.5, 4.0)])
def test_two_workers_on_fewer_cores_compute_in_proportion_longer(cores: float | None, slower: float) -> None:
    hosts = tuple(msgspec.structs.replace(host, cores=cores) for host in TWO_BY_TWO.hosts)
    cluster = msgspec.structs.replace(TWO_BY_TWO, hosts=hosts)

    assert simulate(plan_of(cluster, compute(1.0)), cluster).step_s == pytest.approx(slower, rel=1e-3)


def test_a_communication_of_crowded_ranks_waits_until_all_are_awake() -> None:
    def took_s(cores: float) -> float:
        hosts = tuple(msgspec.structs.replace(host, cores=cores) for host in TWO_BY_TWO.hosts)
        cluster = msgspec.structs.replace(TWO_BY_TWO, hosts=hosts)
        return simulate(plan_of(cluster, start(0, 8, group="workers"), Wait(0)), cluster).step_s

    assert took_s(1.0) == pytest.approx(took_s(2.0) + PER_COMMUNICATION_S + OVERSUBSCRIBED_WAIT_S)


def test_cores_that_slow_each_other_down_make_nobody_wait() -> None:
    def took_s(cores: float) -> float:
        hosts = tuple(msgspec.structs.replace(host, cores=cores) for host in TWO_BY_TWO.hosts)
        cluster = msgspec.structs.replace(TWO_BY_TWO, hosts=hosts)
        return simulate(plan_of(cluster, start(0, 8, group="workers"), Wait(0)), cluster).step_s

    assert took_s(1.25) == pytest.approx(took_s(2.0) + (2 / 1.25 - 1) * PER_COMMUNICATION_S)


def test_who_waits_leaves_its_core_to_others() -> None:
    hosts = tuple(msgspec.structs.replace(host, cores=1.0) for host in TWO_BY_TWO.hosts)
    cluster = msgspec.structs.replace(TWO_BY_TWO, hosts=hosts)
    serving = msgspec.structs.replace(compute(1.0), site="server")

    both_compute = simulate(plan_of(cluster, compute(1.0)), cluster).step_s
    one_serves = simulate(plan_of(cluster, serving), cluster).step_s
    one_serves_later = simulate(plan_of(cluster, compute(1.0), serving), cluster).step_s

    assert both_compute == pytest.approx(2.0, rel=1e-3)
    assert one_serves == pytest.approx(1.0, rel=1e-3)
    assert one_serves_later == pytest.approx(3.0, rel=1e-3)


def on_cores(cores: float | None) -> Cluster:
    hosts = tuple(msgspec.structs.replace(host, cores=cores) for host in TWO_BY_TWO.hosts)
    return msgspec.structs.replace(TWO_BY_TWO, hosts=hosts)


@pytest.mark.parametrize(
    ("cores", "share"),
    [(None, 0.0), (4.0, 0.0), (3.0, 0.5), (2.0, 1.0)],
    ids=["unknown", "a core for each thread", "one to spare", "none to spare"],
)
def test_bytes_that_move_beside_computing_take_of_its_core(cores: float | None, share: float) -> None:
    cluster = on_cores(cores)
    local = start(0, 10**9, kind="broadcast", group="host_workers")

    moved = simulate(plan_of(cluster, local, Wait(0)), cluster).step_s
    beside = simulate(plan_of(cluster, local, compute(5.0), Wait(0)), cluster).step_s

    assert moved == pytest.approx(2 * 10**9 / TWO_BY_TWO.hosts[0].memory_bytes_per_s, rel=0.01), "in, and out"
    assert beside == pytest.approx(5.0 + share * moved, rel=1e-3)


def test_bytes_that_move_while_a_rank_waits_take_nothing_else() -> None:
    cluster = on_cores(2.0)
    local = start(0, 10**9, kind="broadcast", group="host_workers")

    moved = simulate(plan_of(cluster, local, Wait(0)), cluster).step_s
    before = simulate(plan_of(cluster, local, Wait(0), compute(5.0)), cluster).step_s
    partly = simulate(plan_of(cluster, local, compute(moved / 4), Wait(0), compute(5.0)), cluster).step_s

    assert before == pytest.approx(5.0 + moved, rel=1e-3)
    assert partly == pytest.approx(5.0 + moved + moved / 4, rel=1e-3), "one core, which does all of it"


def test_measured_segments_are_not_priced() -> None:
    plan = plan_of(TWO_BY_TWO, compute(1.0))

    assert simulate(plan, TWO_BY_TWO, Measured({"segments/0123456789ab.onnx": 0.25})).step_s == 0.25
    assert simulate(plan, TWO_BY_TWO, Measured({"segments/other.onnx": 0.25})).step_s == pytest.approx(
        1.0, rel=1e-3
    )


def test_playing_twice_gives_the_same_timeline() -> None:
    plan = plan_of(TWO_BY_TWO, compute(0.1), start(0, 1000, group="workers"), compute(0.2), Wait(0))

    first, second = simulate(plan, TWO_BY_TWO), simulate(plan, TWO_BY_TWO)

    assert first.events == second.events
    assert first.step_s == second.step_s


@pytest.mark.parametrize("seed", range(20))
def test_a_communication_behind_others_takes_as_long_as_alone(seed: int) -> None:
    """Drawn from few: what moves the same is priced once, and what differs in one thing is not the same."""
    rng = random.Random(seed)
    starts = [drawn_start(rng, tag) for tag in range(60)]
    alone = [simulate(plan_of(TWO_BY_TWO, start, Wait(start.tag_id)), TWO_BY_TWO) for start in starts]

    in_turn = (instruction for start in starts for instruction in (start, Wait(start.tag_id)))
    played = simulate(plan_of(TWO_BY_TWO, *in_turn), TWO_BY_TWO)

    assert durations(played) == pytest.approx(
        [s for timeline in alone for s in durations(timeline)], abs=1e-9
    )
    assert [event.payload_bytes for event in played.events] == [
        event.payload_bytes for timeline in alone for event in timeline.events
    ]
    for rank in range(len(plan_of(TWO_BY_TWO).ranks)):
        sent = sum(timeline.sent_bytes[rank] for timeline in alone)
        assert played.sent_bytes[rank] == pytest.approx(sent, abs=len(starts))


def durations(timeline: Timeline) -> list[float]:
    return [event.stop_s - event.start_s for event in timeline.events]


def drawn_start(rng: random.Random, tag: int) -> Start:
    group, members = rng.choice([("workers", 4), ("host_workers", 2), ("leaders", 2), ("host", 2)])
    kind = rng.choice(get_args(Kind))
    sites = ("worker", "server")
    counts = tuple(rng.choice((8, 64)) for _ in range(members))
    instruction = Start(
        tag,
        kind,
        group,
        rng.choice(sites),
        rng.choice(sites),
        ("g",),
        ("g",),
        payload_bytes=rng.choice((1 << 12, 1 << 20)),
        counts=counts if kind in ("reduce_scatter", "all_gather") else (),
        rounds_to=rng.choice(("", "float16")) if kind in ("all_reduce", "reduce_scatter") else "",
    )
    if kind != "exchange":
        return instruction
    moved = Move(0, 1, (((0, rng.choice((1 << 10, 1 << 18))),),))
    has: tuple[None, ...] = (None,) * members  # what is moved is what is priced
    return msgspec.structs.replace(instruction, exchange=Exchange("float32", (1 << 18,), has, has, (moved,)))


def test_labels_name_communications_and_segments() -> None:
    named = msgspec.structs.replace(start(0, 8), label="gradients of block 3")

    timeline = simulate(plan_of(TWO_BY_TWO, compute(0.1), named), TWO_BY_TWO)

    assert {event.label for event in timeline.events} == {"worker 0123456789ab", "gradients of block 3"}


# ---------------------------------------------------------------- memory


def test_memory_counts_shards_buffers_once_and_activations() -> None:
    plan = plan_of(TWO_BY_TWO, Run("worker", "segments/s.onnx", (), (), inner_bytes=500))
    pieces = (VariablePiece("E", "E", rows_box((100, 4), 0, 25)), VariablePiece("W", "W"))
    first = msgspec.structs.replace(plan.ranks[0], pieces=pieces)
    plan = msgspec.structs.replace(
        plan,
        ranks=(first, *plan.ranks[1:]),
        variables=(
            PlanVariable("E", "float32", (100, 4), Constant(0.0), "parameter"),
            PlanVariable("W", "float64", (8,), Constant(0.0), "parameter"),
        ),
        buffers=(Buffer("bucket", "float64", 8, ("worker",)), Buffer("served", "int64", 2, ("server",))),
        slices=(Slice("W", "bucket", 0, (8,)),),
    )

    memory = memory_of(plan, TWO_BY_TWO)

    assert memory[0].variables_bytes == 25 * 4 * 4  # W lies in the bucket
    assert memory[0].buffers_bytes == 64 + 16
    assert memory[0].activations_bytes == 500
    assert memory[0].needed_bytes == 400 + 80 + 500 + PROCESS_BYTES
    assert memory[1].buffers_bytes == 64
    assert memory[0].limit_bytes == 2 * 2**30  # two devices share 4 GiB


def test_a_gpus_limit_is_its_own_memory_and_its_servers_the_hosts() -> None:
    cluster = one_gpu_each()

    limits = [memory.limit_bytes for memory in memory_of(plan_of(cluster), cluster)]

    assert limits == [12 * 2**30, 12 * 2**30, 2**34, 2**34]
