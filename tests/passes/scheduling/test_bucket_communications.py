import numpy as np

from partc.passes.lowering.lowered_graph import LoweredGraph, is_communication
from partc.passes.scheduling.bucket_communications import Bucket, bucket_communications, copy_where_shared
from tests.builders.graphs.small_steps import lines, lowered_of

TWO_LAYERS = """
step (double[8,4] x, double[8,3] dy, double[4,3] W, double[3] b, double[4,3] V)
    => (double[4,3] W_next, double[3] b_next, double[4,3] V_next) <int64[1] rows = {0}> {
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dy)
    db = ReduceSum <keepdims = 0> (dy, rows)
    W_next = Sub (W, dW)
    b_next = Sub (b, db)
    moved = Mul (dW, dW)
    mixed = MatMul (x, moved)
    dV = MatMul (xt, mixed)
    V_next = Sub (V, dV)
}
"""
SHAPES = {"dW": (4, 3), "db": (3,), "dV": (4, 3)}
WHOLE = {f"{name}@worker.whole": shape for name, shape in SHAPES.items()}
SPLIT = {"x": 0, "dy": 0}


def buckets_of(lowered: LoweredGraph, **options: object) -> list[Bucket]:
    by_node = bucket_communications(lowered, WHOLE, {"W": ((0, 1), (1, 4)), "b": ((0, 0), (0, 3))}, **options)  # type: ignore[arg-type]
    return list({bucket.name: bucket for bucket in by_node.values()}.values())


def members(bucket: Bucket) -> list[str]:
    return [node.inputs[0].name for node in bucket.members]


def test_what_others_wait_for_travels_without_what_nobody_waits_for() -> None:
    first, second = buckets_of(lowered_of(TWO_LAYERS, SPLIT))

    assert (members(first), members(second)) == (["dW"], ["db", "dV"])  # dV is made of the sum of dW
    assert (second.shapes, second.offsets, second.elements) == (((3,), (4, 3)), (0, 3), 15)
    assert (second.op, second.site, second.reduction, second.nbytes) == ("AllReduce", "worker", "sum", 120)


def test_a_full_bucket_is_closed() -> None:
    found = buckets_of(lowered_of(TWO_LAYERS, SPLIT), limit_bytes=100)

    assert [members(bucket) for bucket in found] == [["dW"], ["db"], ["dV"]]


def test_a_tensor_larger_than_a_bucket_has_its_own() -> None:
    found = buckets_of(lowered_of(TWO_LAYERS, SPLIT), limit_bytes=1)

    assert [members(bucket) for bucket in found] == [["dW"], ["db"], ["dV"]]


def test_what_has_no_known_size_is_in_no_bucket() -> None:
    lowered = lowered_of(TWO_LAYERS, SPLIT)

    assert bucket_communications(lowered, {}, {}) == {}


def test_rows_that_are_spread_over_servers_are_counted_by_owner() -> None:
    lowered = lowered_of(TWO_LAYERS, SPLIT, methods={"W": "servers", "b": "servers"})
    pushed = [node for node in lowered.nodes if is_communication(node) and node.op == "Push"]
    shapes = {node.outputs[0].name: SHAPES[node.inputs[0].name] for node in pushed}
    rows = {"W": ((0, 1), (1, 4)), "b": ((0, 0), (0, 3))}

    by_node = bucket_communications(lowered, shapes, rows)

    pushes = {bucket.members[0].attrs["owner"]: bucket for bucket in by_node.values()}
    assert pushes["W"].counts == (1 * 3, 3 * 3)
    assert pushes["b"].counts == (0, 3)
    assert all(len(bucket.members) == 1 for bucket in pushes.values())


def test_an_operand_that_others_read_is_copied_before_it_is_overwritten() -> None:
    lowered = lowered_of(
        """
step (double[8,4] x, double[8,3] dy, double[4,3] W) => (double[4,3] W_next, double[4,3] own) {
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dy)
    W_next = Sub (W, dW)
    own = Tanh (W)
}
""",
        SPLIT,
    )
    reduced = next(node for node in lowered.nodes if is_communication(node))
    lowered.outputs.append(("dW", "dW", lowered.meanings["dW"][1]))

    copy_where_shared(lowered)

    assert "dW.sent.AllReduce = Identity (dW)" in lines(lowered)
    assert [tensor.name for tensor in reduced.inputs] == ["dW.sent.AllReduce"]


def test_an_operand_of_its_own_is_not_copied() -> None:
    lowered = lowered_of(TWO_LAYERS, SPLIT)

    copy_where_shared(lowered)

    assert not any(node.op == "Identity" for node in lowered.nodes)
    assert all(
        np.dtype(node.inputs[0].dtype) == np.float64 for node in lowered.nodes if is_communication(node)
    )
