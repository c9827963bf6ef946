from pathlib import Path

import msgspec
import pytest

from partc.cost.cluster.cluster import CLUSTER_FORMAT, Cluster, read_cluster
from partc.cost.strategy import (
    MESH_STRATEGY_FORMAT,
    STRATEGY_FORMAT,
    Method,
    OpConfig,
    Shard,
    Strategy,
    SyncFacts,
    Synchronisation,
    read_strategy,
    write_strategy,
)
from partc.cost.strategy_check import check_strategy
from partc.runtime.errors import BadStrategy

CLUSTER = read_cluster(Path(__file__).parents[2] / "examples" / "cluster-2x2.json")
FACTS = (
    SyncFacts("E", rows=100, row_bytes=8, slot_row_bytes=0, sparse=True, touched_rows=5),
    SyncFacts("W", rows=10, row_bytes=8, slot_row_bytes=0, sparse=False, touched_rows=10),
    SyncFacts("scale", 1, row_bytes=4, slot_row_bytes=0, sparse=False, touched_rows=1, servable=False),
)
WHOLE = (Shard("host0", 0, 60), Shard("host1", 60, 100))


def strategy(name: str, method: Method, shards: tuple[Shard, ...] = ()) -> Strategy:
    return Strategy(STRATEGY_FORMAT, "global", {name: Synchronisation(method, shards)})


def test_a_strategy_survives_writing_and_reading_and_equal_ones_give_equal_bytes(tmp_path: Path) -> None:
    one = Strategy(
        STRATEGY_FORMAT,
        "per-replica",
        {"W": Synchronisation("all_reduce"), "E": Synchronisation("servers", WHOLE)},
    )
    other = Strategy(STRATEGY_FORMAT, "per-replica", dict(reversed(one.parameters.items())))

    write_strategy(one, tmp_path / "one.json")
    write_strategy(other, tmp_path / "other.json")

    assert read_strategy(tmp_path / "one.json") == one
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "other.json").read_bytes()


def test_axes_and_dimensions_keep_their_order(tmp_path: Path) -> None:
    split: dict[str, int | str] = {"out:1": 2, "in:0:1": 2, "batch": 1}
    ops = (OpConfig("fc", split, devices=("h/cpu0", "h/cpu1", "h/cpu2", "h/cpu3")),)
    mesh = {"rows": 2, "columns": 3, "data": 1}
    write_strategy(Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh=mesh, ops=ops), tmp_path / "s.json")

    read = read_strategy(tmp_path / "s.json")

    assert list(read.mesh) == list(mesh)
    assert list(read.ops[0].split or ()) == list(split)


@pytest.mark.parametrize(
    ("text", "what", "at"),
    [
        ("{", "truncated", "as a whole"),
        ('{"format": "partc-strategy/1", "parameters": {}}', "missing required field", "as a whole"),
        (
            '{"format": "partc-strategy/1", "batch": "global", "parameters": {"W": {"method": "magic"}}}',
            "Invalid enum value 'magic'",
            "$.parameters.W.method",
        ),
        (
            '{"format": "partc-strategy/1", "batch": "global", "parameters": {}, "ops": [{"op": "MatMul"}]}',
            "'ops' in a strategy of format 'partc-strategy/1'",
            "format",
        ),
        ('{"format": "partc-strategy/9", "batch": "global", "parameters": {}}', "partc-strategy/9", "format"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(tmp_path: Path, text: str, what: str, at: str) -> None:
    path = tmp_path / "strategy.json"
    path.write_text(text)

    with pytest.raises(BadStrategy) as caught:
        read_strategy(path)

    assert what in caught.value.what
    assert at in caught.value.at


def test_a_file_by_hand_needs_a_format_and_a_batch(tmp_path: Path) -> None:
    (tmp_path / "least.json").write_text('{"format": "partc-strategy/2", "batch": "global"}')
    (tmp_path / "less.json").write_text('{"format": 2}')

    assert read_strategy(tmp_path / "least.json") == Strategy(MESH_STRATEGY_FORMAT, "global")
    with pytest.raises(BadStrategy, match='"format": "partc-strategy/2", "batch": "global"'):
        read_strategy(tmp_path / "less.json")


def test_a_wrong_field_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    path.write_text('{"format": "partc-strategy/2", "batch": "global", "operators": []}')

    with pytest.raises(BadStrategy, match=r"`operators`.*\n.*\n.*mesh, devices, variables, ops, stages"):
        read_strategy(path)


def test_a_name_written_twice_is_refused_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    meshes = '"mesh": {"data": 4}, "mesh": {"data": 2, "tensor": 2}'
    path.write_text(f'{{"format": "partc-strategy/2", "batch": "global", {meshes}}}')

    with pytest.raises(BadStrategy, match=r"the name 'mesh' is there twice"):
        read_strategy(path)


@pytest.mark.parametrize("entries", ['"devices": []', '"ops": [{"op": "layer1", "devices": []}]'])
def test_an_empty_list_of_devices_is_refused(entries: str, tmp_path: Path) -> None:
    path = tmp_path / "strategy.json"
    path.write_text(f'{{"format": "partc-strategy/2", "batch": "global", {entries}}}')

    with pytest.raises(BadStrategy, match=r"length >= 1(?s:.)*devices"):
        read_strategy(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadStrategy, match="cannot be read"):
        read_strategy(tmp_path / "strategy.json")


@pytest.mark.parametrize(
    "right",
    [
        strategy("E", "servers", WHOLE),
        strategy("E", "servers"),  # partc places the shards
        strategy("E", "servers", (Shard("host1", 0, 100),)),
        strategy("E", "all_gather"),
        strategy("W", "all_reduce"),
        Strategy(STRATEGY_FORMAT, "global", {}),  # partc decides everything
    ],
)
def test_what_fits_the_model_and_the_cluster_is_accepted(right: Strategy) -> None:
    check_strategy(right, FACTS, CLUSTER)


@pytest.mark.parametrize(
    ("wrong", "what", "at", "fix"),
    [
        (strategy("V", "all_reduce"), "unknown parameter 'V'", "parameters: V", "'E', 'W'"),
        (strategy("W", "all_gather"), "dense gradient", "W: method", "all_reduce"),
        (strategy("scale", "servers"), "cannot live there", "scale: method", "all_reduce"),
        (strategy("E", "all_reduce", WHOLE), "shards under", "E: shards", "remove the shards"),
        (strategy("E", "servers", (Shard("host9", 0, 100),)), "'host9'", "shards[0].host", "'host0'"),
        (strategy("E", "servers", (WHOLE[1], WHOLE[0])), "rows [0, 60)", "shards[0].start", "write 0"),
        (
            strategy("E", "servers", (Shard("host1", 0, 60), Shard("host0", 60, 100))),
            "out of the cluster's order",
            "shards[1].host",
            "'host0', 'host1'",
        ),
        (
            strategy("E", "servers", (Shard("host0", 0, 50), Shard("host1", 60, 100))),
            "rows [50, 60) belong to nobody",
            "shards[1].start",
            "write 50",
        ),
        (
            strategy("E", "servers", (Shard("host0", 0, 70), Shard("host1", 60, 100))),
            "rows [60, 70) belong to two shards",
            "shards[1].start",
            "write 70",
        ),
        (strategy("E", "servers", (Shard("host0", 0, 60),)), "rows [60, 100)", "E: shards", "stop at 100"),
        (strategy("E", "servers", (Shard("host0", 0, 101),)), "stop 101", "shards[0].stop", "1 to 100"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_repair(wrong: Strategy, what: str, at: str, fix: str) -> None:
    with pytest.raises(BadStrategy) as caught:
        check_strategy(wrong, FACTS, CLUSTER)

    assert what in caught.value.what
    assert at in caught.value.at
    assert fix in caught.value.fix


def test_servers_are_refused_where_no_host_is_one() -> None:
    hosts = tuple(msgspec.structs.replace(host, server=False) for host in CLUSTER.hosts)
    cluster = Cluster(CLUSTER_FORMAT, "no servers", hosts, links=CLUSTER.links)

    with pytest.raises(BadStrategy, match="server: false"):
        check_strategy(strategy("W", "servers"), FACTS, cluster)


@pytest.mark.parametrize(
    ("name", "how", "fix"),
    [
        ("E", Synchronisation("all_gather", local_aggregation=False), 'write the method "servers"'),
        ("W", Synchronisation("servers", on_servers=("Slice_3",)), "no node of this parameter"),
    ],
)
def test_a_mechanism_that_a_parameter_cannot_use_is_refused(
    name: str, how: Synchronisation, fix: str
) -> None:
    edited = Strategy(STRATEGY_FORMAT, "global", {name: how})

    with pytest.raises(BadStrategy, match=fix):
        check_strategy(edited, FACTS, CLUSTER)
