"""Hold what ranks compute to what a configuration asks for: operations counted from the tensors of a step.

MatMul, Gemm, Conv       2 per entry of the result and of what is summed for it
ConvWeightGrad           the same: samples and space are summed
ConvDataGrad             2 per entry of dy and of the kernel behind it
others                   1 per entry of the result
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import prod

import numpy as np
import onnx_graphsurgeon as gs

from partc.cost.strategy import OpConfig
from partc.passes.graph.facts import Facts
from partc.passes.rules.sharding_rules import rule_of
from partc.passes.windows.read_windows import gradient_of, transposed_windows_of, windows_of
from partc.passes.windows.windows import Windows
from partc.runtime.plan.boxes import local_shape
from tests.builders.plans.compiled_steps import Compiled
from tests.checks.work_of_parts import entries_of, most_flops

Pieces = Mapping[str, Mapping[int, np.ndarray]]  # value -> rank -> what it has of it


def check_work(compiled: Compiled, pieces: Pieces) -> int:
    """Hold each operator that an entry divides to its part; return how many were held.

    On every rank, all micro-batches together. `pieces`: of one step, as `run_opened` returns them.
    """
    analysis, strategy = compiled.compilation.analysis, compiled.compilation.strategy
    nodes = {node.name: node for node in analysis.training.graph.nodes}
    held = 0
    for config in {config.op: config for config in strategy.ops}.values():  # the last of an operator
        node = nodes.get(config.op)
        if node is not None and config.devices:
            _check_devices(compiled, config)
        if node is None or config.split is None:
            continue  # said in primitives, or as its operands are
        shares = [
            Fraction(count) / limit
            for copy, count in _operations(compiled, node, pieces)
            if (limit := _limit(compiled, node, config, copy))
        ]
        held += bool(shares)
        assert not shares or min(shares) <= 1, (config, f"{float(min(shares))} of what its part has")
    return held


def _check_devices(compiled: Compiled, config: OpConfig) -> None:
    """Hold an operator to its devices, the first of these to its first part; what is known runs anywhere."""
    lowered, analysis = compiled.compilation.lowered, compiled.compilation.analysis
    meshes = {
        lowered.meshes.of(lowered.site_of[copy.name]).workers
        for copy in lowered.nodes
        if lowered.original.get(copy.name) == config.op
    }
    own = tuple(analysis.workers.index(device) for device in config.devices)
    assert not meshes or own in meshes, (config, meshes)


def _limit(compiled: Compiled, node: gs.Node, config: OpConfig, copy: gs.Node) -> Fraction | None:
    """Return the operations of the largest part that an entry makes of an operator, on the mesh of a copy."""
    analysis, lowered = compiled.compilation.analysis, compiled.compilation.lowered
    rule = rule_of(node, analysis.facts)
    if rule is None or config.split is None:
        return None
    sizes = dict(lowered.meshes.of(lowered.site_of[copy.name]).axes)
    parts = {
        dimension: along if isinstance(along, int) else prod(sizes[name] for name in along.split("*"))
        for dimension, along in config.split.items()
    }
    samples = parts.pop("batch", 1)
    if analysis.per_replica or node.name not in _of_samples(compiled):
        return most_flops(rule, parts)
    fed = analysis.training.data_inputs.values()
    (size,) = {entry.shape[entry.sample_axis] for entry in fed if entry.sample_axis is not None}
    assert isinstance(size, int)
    for dimension in [
        d for d in parts if entries_of(rule, d) == size
    ]:  # parts of parts, if it is the samples'
        samples *= parts.pop(dimension)
    return most_flops(rule, parts) * Fraction(-(-size // samples), size)


def _of_samples(compiled: Compiled) -> set[str]:
    """Return the nodes that read samples, or what is made of them."""
    training = compiled.compilation.training
    reached = {name for name, entry in training.data_inputs.items() if entry.sample_axis is not None}
    found: set[str] = set()
    for node in training.graph.nodes:
        if any(tensor.name in reached for tensor in node.inputs):
            found.add(node.name)
            reached.update(tensor.name for tensor in node.outputs)
    return found


def _operations(compiled: Compiled, node: gs.Node, pieces: Pieces) -> Iterator[tuple[gs.Node, int]]:
    """Yield every copy of a node, on one mesh each, and what the rank that does most of it does in a step."""
    lowered = compiled.compilation.lowered
    for copy in lowered.nodes:
        if lowered.original.get(copy.name) != node.name:
            continue
        of_rank: dict[int, int] = {}
        for microbatch in ("", *(f"#{number}" for number in range(compiled.plan.microbatches))):
            for rank in pieces.get(f"{copy.outputs[0].name}{microbatch}", {}):
                of_rank[rank] = of_rank.get(rank, 0) + _count(compiled, copy, pieces, rank, microbatch)
        if of_rank:
            yield copy, max(of_rank.values())


def _count(compiled: Compiled, copy: gs.Node, pieces: Pieces, rank: int, microbatch: str) -> int:
    def shape(tensor: gs.Tensor) -> tuple[int, ...]:
        return _shape(compiled, tensor, pieces, rank, microbatch)

    result = prod(shape(copy.outputs[0]))
    match copy.op:
        case "MatMul":
            return 2 * result * shape(copy.inputs[0])[-1]
        case "Gemm":
            return 2 * result * shape(copy.inputs[0])[0 if copy.attrs.get("transA", 0) else 1]
        case "Conv":
            return 2 * result * prod(shape(copy.inputs[1])[1:])
    return result


def _shape(
    compiled: Compiled, tensor: gs.Tensor, pieces: Pieces, rank: int, microbatch: str
) -> tuple[int, ...]:
    """Return what a rank has of a value: as it was seen, of a variable as it is kept, else as it is fed."""
    if isinstance(tensor, gs.Constant):
        return tuple(tensor.values.shape)
    for name in (f"{tensor.name}{microbatch}", tensor.name):
        if rank in pieces.get(name, {}):
            return pieces[name][rank].shape
    variables = {variable.name: variable.shape for variable in compiled.plan.variables}
    for piece in compiled.plan.ranks[rank].pieces:
        if piece.value == tensor.name:
            return local_shape(variables[piece.variable], piece.box)
    sizes = compiled.compilation.lowered.shapes[tensor.name]
    return tuple(size or 0 for size in sizes)


# ---------------------------------------------------------------- halos


def check_halos(compiled: Compiled, pieces: Pieces) -> int:
    """Hold what windows read of divided images to a part and its halo; return how many images were held."""
    analysis, lowered = compiled.compilation.analysis, compiled.compilation.lowered
    nodes = {node.name: node for node in analysis.training.graph.nodes}
    held = 0
    for copy in lowered.nodes:
        node = nodes.get(lowered.original.get(copy.name, ""))
        rule = None if node is None else rule_of(node, analysis.facts)
        if node is None or rule is None or not rule.windows:
            continue
        held += _check_overlaps(compiled, node, copy, pieces)
        for index, operand in enumerate(copy.inputs):
            tensor = _unweighed(operand)
            layout = lowered.meanings.get(tensor.name, (None, None))[1]
            for number, widened in () if layout is None else layout.widened():
                parts = lowered.meshes.size(layout.site, number)
                whole = analysis.facts.shape(node.inputs[index].name)[widened.axis]
                halos = [halo for of in rule.windows.values() for place, halo in of.items() if place == index]
                most = whole // parts + max(halo.before + halo.after for halo in halos)
                found = pieces.get(tensor.name) or pieces.get(f"{tensor.name}#0") or {}
                for array in found.values():
                    assert array.shape[widened.axis] <= most, (node.name, array.shape, most)
                held += bool(found)
    return held


def _check_overlaps(compiled: Compiled, node: gs.Node, copy: gs.Node, pieces: Pieces) -> int:
    """Hold what a rank reads of images that others read too to what the windows of its part read.

    The gradient of the data reads the windows that meet its part; a MaxPool's also what these windows read.
    """
    lowered, facts = compiled.compilation.lowered, compiled.compilation.analysis.facts
    held = 0
    for index, operand in enumerate(copy.inputs):
        tensor = _unweighed(operand)
        layout = lowered.meanings.get(tensor.name, (None, None))[1]
        for _, overlapping in () if layout is None else layout.overlapping():
            axis, windows = overlapping.axis, _windows(node, facts)
            assert windows is not None
            stride, span = windows.strides[axis - 2], windows.spans[axis - 2]
            cut = copy.inputs[1] if node.op.startswith("ConvWeightGrad") else copy.outputs[0]
            for microbatch in ("", "#0"):
                for rank, array in pieces.get(f"{tensor.name}{microbatch}", {}).items():
                    value = gs.Variable(cut.name.removesuffix(".wide"))
                    part = _shape(compiled, value, pieces, rank, microbatch)[axis]
                    meeting = (part + span - 2) // stride + 1  # windows that meet so many entries
                    match node.op.split("_")[0], index:
                        case ("ConvDataGrad" | "AveragePoolGrad" | "LpPoolGrad" | "ConvTranspose", _):
                            most = meeting
                        case "MaxPoolGrad", 1:
                            most = meeting
                        case "MaxPoolGrad", _:
                            most = (meeting - 1) * stride + span
                        case _:
                            most = (part - 1) * stride + span
                    assert not part or array.shape[axis] <= most, (node.name, array.shape, part, most)
                    held += part > 0
    return held


def _unweighed(tensor: gs.Tensor) -> gs.Tensor:
    """Return the gradient that an average's gradient reads, before its windows were weighed."""
    while ".weighed" in tensor.name:
        tensor = tensor.inputs[0].inputs[0]
    return tensor


def _windows(node: gs.Node, facts: Facts) -> Windows | None:
    if node.op == "ConvTranspose":
        return transposed_windows_of(node, facts)
    gradient = gradient_of(node, facts)
    return windows_of(node, facts) if gradient is None else gradient.windows
