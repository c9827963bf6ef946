from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.microbatches.find_repeated import find_repeated
from partc.passes.scheduling.bucket_communications import bucket_communications
from partc.passes.scheduling.schedule import Chunk, Communication, Item, schedule
from tests.builders.graphs.small_steps import lowered_of, training_of
from tests.passes.scheduling.test_bucket_communications import SPLIT, TWO_LAYERS, WHOLE

OWNED_ROWS = {"W": ((0, 1), (1, 4)), "b": ((0, 0), (0, 3)), "V": ((0, 2), (2, 4))}


def scheduled(lowered: LoweredGraph, text: str = TWO_LAYERS, limit_bytes: int = 10**6) -> list[Item]:
    shape = (512, 512) if text == LARGE else None
    whole = {name: shape or known for name, known in WHOLE.items()}
    buckets = bucket_communications(lowered, whole, OWNED_ROWS, limit_bytes)
    nodes = training_of(text, SPLIT).graph.nodes
    order = {node.name: index for index, node in enumerate(nodes)}
    places = {copy: order[node] for copy, node in lowered.original.items()}
    return schedule(lowered, buckets, places, find_repeated(lowered))


def shown(items: list[Item]) -> list[tuple[str, list[str]]]:
    return [
        (item.site if isinstance(item, Chunk) else "message", [n.outputs[0].name for n in item.nodes])
        for item in items
    ]


def test_a_segment_ends_where_communication_is_waited_for() -> None:
    assert shown(scheduled(lowered_of(TWO_LAYERS, SPLIT))) == [
        ("worker", ["xt", "dW", "db"]),
        ("message", ["dW@worker.whole"]),
        ("worker", ["W_next", "moved", "mixed", "dV"]),
        ("message", ["db@worker.whole", "dV@worker.whole"]),
        ("worker", ["b_next", "V_next"]),
    ]


def test_every_value_exists_before_it_is_read() -> None:
    for methods in ({}, {"W": "servers", "b": "servers"}, {"W": "servers", "V": "servers"}):
        lowered = lowered_of(TWO_LAYERS, SPLIT, methods=methods)
        made = {tensor.name for node in lowered.nodes for tensor in node.outputs}
        known: set[str] = set()
        for item in scheduled(lowered):
            for node in item.nodes:
                reads = {tensor.name for tensor in node.inputs} & made
                assert reads <= known, (node.name, reads - known)
                if isinstance(item, Chunk):
                    known.update(tensor.name for tensor in node.outputs)
            known.update(tensor.name for node in item.nodes for tensor in node.outputs)
        assert known >= made


LARGE = """
step (double[8,512] x, double[8,512] dy, double[512,512] W, double[512,512] V)
    => (double[512,512] W_next, double[512,512] V_next) {
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, dy)
    first = Tanh (dy)
    second = Tanh (first)
    rest = Tanh (second)
    dV = MatMul (xt, rest)
    W_next = Sub (W, dW)
    V_next = Sub (V, dV)
}
"""


def test_a_large_message_begins_while_the_backward_pass_goes_on() -> None:
    items = scheduled(lowered_of(LARGE, SPLIT), LARGE, limit_bytes=1)

    (one, before), sent, (_, between), also_sent, *_ = shown(items)
    assert (one, before[-1], sent) == ("worker", "dW", ("message", ["dW@worker.whole"]))
    assert (between[-1], also_sent) == ("dV", ("message", ["dV@worker.whole"]))
    assert "rest" in between


def test_messages_of_no_bucket_travel_alone() -> None:
    lowered = lowered_of(TWO_LAYERS, SPLIT)

    items = schedule(lowered, {}, {}, find_repeated(lowered))

    messages = [item for item in items if isinstance(item, Communication)]
    assert [len(message.nodes) for message in messages] == [1, 1, 1]
    assert all(message.bucket is None for message in messages)


DECAYED = """
step (double[8,4] x, double[8,3] dy, double[4,3] W) => (double[4,3] W_next) <double keep = {0.9}> {
    kept = Mul (keep, W)
    square = Mul (W, W)
    h = MatMul (x, square)
    xt = Transpose <perm = [1, 0]> (x)
    g = Add (h, dy)
    dW = MatMul (xt, g)
    W_next = Sub (kept, dW)
}
"""


def test_what_reads_variables_alone_waits_for_its_first_reader() -> None:
    assert shown(scheduled(lowered_of(DECAYED, SPLIT), DECAYED)) == [
        ("worker", ["square", "h", "xt", "g", "dW"]),
        ("message", ["dW@worker.whole"]),
        ("worker", ["kept", "W_next"]),
    ]
