"""Sharding rules of ops that gather and scatter by index.

The indexed axis of a table stays whole among workers; on servers, which own rows, it is a region
map: ids are offset by the first row owned (see passes/lower_nodes.py).
"""

import onnx_graphsurgeon as gs

from partc.passes.graph.facts import Facts
from partc.passes.rules.rules_elementwise import named
from partc.passes.rules.sharding_rule import Dims, ShardingRule


def gather(node: gs.Node, facts: Facts) -> ShardingRule:
    """Gather: v d.., i.. -> i.. d.. (at `axis`), linear in the data."""
    data, indices = (facts.shape(tensor.name) for tensor in node.inputs)
    axis = node.attrs.get("axis", 0) % len(data)
    data_dims, sizes = named("d", data)
    index_dims, index_sizes = named("i", indices)
    out = (*data_dims[:axis], *index_dims, *data_dims[axis + 1 :])
    whole = frozenset({f"d{axis}"})
    return ShardingRule(
        (data_dims, index_dims),
        (out,),
        sizes | index_sizes,
        ((0,),),
        frozenset({0}),
        whole=whole,
        moves=True,
    )


def gather_elements(node: gs.Node, facts: Facts) -> ShardingRule:
    """GatherElements: out[i][j] = data[index[i][j]][j]; the other axes go alike."""
    data, indices = (facts.shape(tensor.name) for tensor in node.inputs)
    axis = node.attrs.get("axis", 0) % len(data)
    index_dims, sizes = named("i", indices)
    data_dims, whole = _aligned(data, indices, axis, sizes)
    linear = frozenset({0})
    return ShardingRule(
        (data_dims, index_dims), (index_dims,), sizes, ((0,),), linear, whole=whole, moves=True
    )


def scatter_elements(node: gs.Node, facts: Facts) -> ShardingRule:
    """ScatterElements: axes beside the scattered one go alike; along it the updates are summed."""
    data, indices = facts.shape(node.inputs[0].name), facts.shape(node.inputs[1].name)
    axis = node.attrs.get("axis", 0) % len(data)
    index_dims, sizes = named("i", indices)
    data_dims, whole = _aligned(data, indices, axis, sizes)
    adds = node.attrs.get("reduction", "none") == "add"
    return ShardingRule(
        (data_dims, index_dims, index_dims),
        (data_dims,),
        sizes,
        ((0,), (2,)) if adds else (),
        frozenset({0, 2}) if adds else frozenset(),
        combine={f"i{axis}": "sum"} if adds else {},
        whole=whole if adds else whole | {f"i{axis}"},
        indexed=frozenset({f"v{axis}"}),
    )


def _aligned(
    data: tuple[int, ...], indices: tuple[int, ...], axis: int, sizes: dict[str, int]
) -> tuple[Dims, frozenset[str]]:
    """Name the data's axes: like the indices' where of equal size, the indexed axis whole."""
    dims: list[tuple[str, ...]] = []
    whole: set[str] = set()
    for position, size in enumerate(data):
        if position != axis and size == indices[position]:
            dims.append((f"i{position}",))
            continue
        sizes[f"v{position}"] = size
        dims.append((f"v{position}",))
        whole.add(f"v{position}")
        if position != axis:
            whole.add(f"i{position}")
    return tuple(dims), frozenset(whole)


def scatter_nd(node: gs.Node, facts: Facts) -> ShardingRule:
    """ScatterND: v.. d.., s.. K, s.. d.. -> v.. d..; with reduction add the s are summed."""
    data, indices = facts.shape(node.inputs[0].name), facts.shape(node.inputs[1].name)
    depth = indices[-1]
    data_dims, sizes = named("d", data)
    leading, leading_sizes = named("s", indices[:-1])
    index_dims: Dims = (*leading, ("k",))
    update_dims: Dims = (*leading, *data_dims[depth:])
    adds = node.attrs.get("reduction", "none") == "add"
    indexed = {f"d{axis}" for axis in range(depth)} | {"k"}
    return ShardingRule(
        (data_dims, index_dims, update_dims),
        (data_dims,),
        sizes | leading_sizes | {"k": depth},
        ((0,), (2,)) if adds else (),
        frozenset({0, 2}) if adds else frozenset(),
        combine=dict.fromkeys(leading_sizes, "sum") if adds else {},
        whole=frozenset(indexed if adds else indexed | set(leading_sizes)),
        indexed=frozenset(indexed),
    )


def gather_nd(node: gs.Node, facts: Facts) -> ShardingRule:
    """GatherND: the batch axes and the leading index axes are free, indexed axes whole."""
    data, indices = (facts.shape(tensor.name) for tensor in node.inputs)
    batch = node.attrs.get("batch_dims", 0)
    depth = indices[-1]
    data_dims, sizes = named("d", data)
    index_free, index_sizes = named("i", indices[batch:-1])
    index_dims: Dims = (*data_dims[:batch], *index_free, ("k",))
    out: Dims = (*data_dims[:batch], *index_free, *data_dims[batch + depth :])
    whole = frozenset({"k", *(f"d{axis}" for axis in range(batch, batch + depth))})
    return ShardingRule(
        (data_dims, index_dims),
        (out,),
        sizes | index_sizes | {"k": depth},
        ((0,),),
        frozenset({0}),
        whole=whole,
    )


def one_hot(node: gs.Node, facts: Facts) -> ShardingRule:
    """OneHot: the indices' axes are free, the class axis whole."""
    indices, output = facts.shape(node.inputs[0].name), facts.shape(node.outputs[0].name)
    axis = node.attrs.get("axis", -1) % len(output)
    dims, sizes = named("i", indices)
    out = (*dims[:axis], ("c",), *dims[axis:])
    return ShardingRule((dims, None, None), (out,), sizes | {"c": output[axis]}, whole=frozenset({"c"}))
