"""Graph inputs that hold the number of shards and a replica's own shard.

create_num_shards_and_shard_id()   declares them for a graph that is being written
declared in the bindings           {"shards": {"n": "num_shards", "i": "shard_id"}}, or by SHARD_INPUTS' names
"""

import msgspec
import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper

from partc.compiler.importing.bindings import Bindings
from partc.runtime.check_arguments import public
from partc.runtime.errors import BadModel, some_of
from partc.runtime.plan.members import SHARD_INPUTS
from partc.runtime.plan.variables import ShardInput


@public
def create_num_shards_and_shard_id() -> tuple[onnx.ValueInfoProto, onnx.ValueInfoProto]:
    """Return two inputs int64[] for a graph that chooses its own part of the data.

    Append them to `graph.input` and read them by name. Whoever trains the graph does not feed them: every
    replica is given the number of replicas, and its own number from 0.
    """
    number, own = (
        helper.make_tensor_value_info(SHARD_INPUTS[holds], TensorProto.INT64, [])
        for holds in ("num_shards", "shard_id")
    )
    return number, own


def declare_shards(graph: onnx.GraphProto, bindings: Bindings) -> Bindings:
    """Return the bindings with the inputs declared by name, which have no sample axis. Raises BadModel."""
    inputs = {info.name for info in graph.input}
    by_name = {name: holds for holds, name in SHARD_INPUTS.items() if name in inputs}
    shards = by_name | bindings.shards
    if unknown := sorted(shards.keys() - inputs):
        raise BadModel(
            f"no input {unknown[0]!r}", at="shards", fix=f"name inputs among {some_of(sorted(inputs))}"
        )
    axes = {name: axis for name, axis in bindings.sample_axes.items() if name not in shards}
    return msgspec.structs.replace(bindings, shards=shards, sample_axes=axes)


def read_shard_inputs(graph: gs.Graph, bindings: Bindings) -> dict[str, ShardInput]:
    """Return the graph's shard inputs. Raises BadModel."""
    shard_inputs: dict[str, ShardInput] = {}
    for tensor in graph.inputs:
        if tensor.name not in bindings.shards:
            continue
        if tensor.shape or np.dtype(tensor.dtype).kind not in "iu":
            raise BadModel(
                f"a shard's number in {tensor.dtype}{list(tensor.shape or ())}",
                at=f"input {tensor.name!r}",
                fix="declare it as int64[]: one whole number",
            )
        dtype = np.dtype(tensor.dtype).name
        shard_inputs[tensor.name] = ShardInput(tensor.name, dtype, bindings.shards[tensor.name])
    return shard_inputs
