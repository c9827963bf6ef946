"""Find out what is known of every tensor before anything runs.

ONNX infers shapes and ONNX Runtime computes values, so all this is done on models of ONNX; what leaves is
numpy's.
"""

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper, numpy_helper

from partc.passes.graph.facts import SMALL, UNKNOWN, Facts, Shape
from partc.passes.graph.infer_shapes import infer_shapes, run_constants
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN, SUM_ROWS
from partc.passes.replicas.average_replicas import AVERAGE, REPLICA_DOMAIN, SUM
from partc.runtime.data.step_draws import evaluate_size
from partc.runtime.errors import UnsupportedModel

NUMBERS = "biuf"  # numpy's own; of others, such as bfloat16, ONNX Runtime computes hardly anything


def infer_facts(training: TrainingGraph, sizes: Mapping[str, int], replicas: int = 1) -> Facts:
    """Infer shapes, dtypes and small values. Raises UnsupportedModel where a rank stays unknown.

    `replicas`: how many replicas meet in the graph's Average, Sum and Stack nodes, if it has any.
    """
    model = _skeleton(training)
    _standardise_replica_ops(model, {AVERAGE: "Identity", SUM: "Sum"}, replicas)
    shapes, dtypes, values = _infer(model, sizes, replicas)
    known = {name: shape for name, shape in shapes.items() if UNKNOWN not in shape}
    doubled = {n: size if n in training.fixed_sizes else 2 * size for n, size in sizes.items()}
    if doubled == sizes:
        return Facts(shapes, dtypes, values, frozenset(known), frozenset(values), shapes)
    other_shapes, _, other_values = _infer(model, doubled, replicas)
    return Facts(
        shapes,
        dtypes,
        values,
        frozenset(name for name, shape in known.items() if other_shapes.get(name) == shape),
        frozenset(
            name
            for name, value in values.items()
            if name in other_values and np.array_equal(other_values[name], value)
        ),
        other_shapes,
    )


def _skeleton(training: TrainingGraph) -> onnx.ModelProto:
    """Return the graph as a model, variables as mere inputs."""
    model: onnx.ModelProto = gs.export_onnx(training.graph)
    model.ir_version = 10
    del model.functions[:]
    model.functions.extend(training.functions)
    known = {entry.domain for entry in model.opset_import}
    for domain in {function.domain for function in training.functions} - known:
        model.opset_import.append(helper.make_opsetid(domain, 1))
    return model


def _standardise_replica_ops(model: onnx.ModelProto, spelled: Mapping[str, str], replicas: int) -> None:
    """Write nodes of all replicas as standard ones: op -> op, a Sum having one input for each replica."""
    for node in model.graph.node:
        if node.domain == REPLICA_DOMAIN and node.op_type in spelled:
            node.domain, node.op_type = "", spelled[node.op_type]
            del node.attribute[:]
            if node.op_type != "Identity":
                node.input.extend([node.input[0]] * (replicas - 1))


def _standardise_stacks(model: onnx.ModelProto, shapes: Mapping[str, Shape], replicas: int) -> bool:
    """Write Stack nodes whose operands' ranks are known as Tile; tell whether there were any.

    Behind them nothing is propagated: inference would spell out every element of what thousands stack.
    """
    stacks = [node for node in model.graph.node if node.domain == REPLICA_DOMAIN and node.input[0] in shapes]
    for node in stacks:
        repeats = [replicas, *[1] * (len(shapes[node.input[0]]) - 1)]
        name = f"{node.output[0]}/repeats"
        model.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [len(repeats)], repeats))
        node.domain, node.op_type = "", "Tile"
        node.input.append(name)
        del node.attribute[:]
    return bool(stacks)


def _infer(
    skeleton: onnx.ModelProto, sizes: Mapping[str, int], replicas: int
) -> tuple[dict[str, Shape], dict[str, np.dtype], dict[str, np.ndarray]]:
    model = onnx.ModelProto()
    model.CopyFrom(skeleton)
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = evaluate_size(dim.dim_param, sizes)
    for value in model.graph.value_info:
        _give_sizes(value, sizes)
    _forget_outputs(model.graph, sizes)
    values = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if _is_small(t.dims)}
    shapes, dtypes = _settle(model, values, propagate=True)
    while _standardise_stacks(model, shapes, replicas):
        shapes, dtypes = _settle(model, values, propagate=False)
    _check_all_known(skeleton, shapes)
    return shapes, dtypes, values


def _settle(
    model: onnx.ModelProto, values: dict[str, np.ndarray], *, propagate: bool
) -> tuple[dict[str, Shape], dict[str, np.dtype]]:
    """Infer shapes and evaluate small values until nothing new is found."""
    while True:
        inferred = infer_shapes(model, data_prop=propagate)
        shapes, dtypes = _read_types(inferred)
        constants = _evaluate_small(model, shapes, dtypes, values)
        declared = not propagate and _declare_sums(model, shapes, dtypes)
        if not constants and not declared:
            return shapes, dtypes
        values.update(constants)
        _replace_by_constants(model, constants)


def _give_sizes(value: onnx.ValueInfoProto, sizes: Mapping[str, int]) -> None:
    """Write numbers for symbols, nothing for those that nobody knows: inference keeps what it finds."""
    for dim in value.type.tensor_type.shape.dim:
        if not dim.dim_param:
            continue
        symbols = {factor for factor in dim.dim_param.split("*") if not factor.isdigit()}
        if symbols <= sizes.keys():
            dim.dim_value = evaluate_size(dim.dim_param, sizes)
        else:
            dim.ClearField("dim_param")


def _forget_outputs(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> None:
    """Drop what outputs declare, whose sizes may be symbolic. Of what is given, that would hide the shape.

    What a Loop carries out has no shape but the declared one.
    """
    carried = {name for n in graph.node if n.domain or n.op_type == "Loop" for name in n.output}
    inputs = {value.name for value in (*graph.input, *graph.initializer)}
    outputs = [value for value in graph.output if value.name not in inputs]
    del graph.output[:]
    graph.output.extend(outputs)
    for value in graph.output:
        if value.name in carried:
            _give_sizes(value, sizes)
        else:
            value.type.tensor_type.ClearField("shape")


def _is_small(dims: "tuple[int, ...]") -> bool:
    return int(np.prod(dims, dtype=np.int64)) <= SMALL


def _declare_sums(
    model: onnx.ModelProto, shapes: Mapping[str, Shape], dtypes: Mapping[str, np.dtype]
) -> bool:
    """State the width of summed rows, which inference finds by propagation alone; tell whether any is new."""
    stated = {value.name: value for value in model.graph.value_info}
    is_new = False
    for node in model.graph.node:
        sums = node.output[1] if node.op_type == SUM_ROWS and node.domain == FUNCTION_DOMAIN else None
        if sums is None or UNKNOWN in shapes[sums][1:]:
            continue
        element = helper.np_dtype_to_tensor_dtype(dtypes[sums])
        info = helper.make_tensor_value_info(sums, element, [None, *shapes[sums][1:]])
        if stated.get(sums) != info:
            others = [value for value in model.graph.value_info if value.name != sums]
            del model.graph.value_info[:]
            model.graph.value_info.extend([*others, info])
            is_new = True
    return is_new


def _read_types(model: onnx.ModelProto) -> tuple[dict[str, Shape], dict[str, np.dtype]]:
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, np.dtype] = {}
    graph = model.graph
    for info in [*graph.input, *graph.value_info, *graph.output]:
        kind = info.type.tensor_type
        if kind.elem_type != TensorProto.UNDEFINED:
            dtypes[info.name] = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if kind.HasField("shape"):
            shapes[info.name] = tuple(d.dim_value for d in kind.shape.dim)
    for tensor in graph.initializer:
        shapes[tensor.name] = tuple(tensor.dims)
        dtypes[tensor.name] = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    for node in graph.node:  # a function body that Unique's dynamic size stops
        if node.op_type == SUM_ROWS and node.domain == FUNCTION_DOMAIN:
            rows = node.input[1]
            unique_ids, sums = node.output
            shapes[unique_ids] = (UNKNOWN,)
            shapes[sums] = (UNKNOWN, *shapes.get(rows, (0, 0))[1:])
            dtypes[unique_ids], dtypes[sums] = np.dtype(np.int64), dtypes.get(rows, np.dtype(np.float32))
    return shapes, dtypes


def _evaluate_small(
    model: onnx.ModelProto,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, np.dtype],
    values: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Run every node whose inputs are known and whose outputs are small."""
    constants: dict[str, np.ndarray] = {}
    chosen: list[onnx.NodeProto] = []
    available = set(values)
    for node in model.graph.node:
        if node.op_type == "Shape" and all(shapes.get(node.input[0], (UNKNOWN,))):
            dims = np.array(shapes[node.input[0]], dtype=np.int64)
            constants[node.output[0]] = dims[_slice_of(node)]
            available.add(node.output[0])
        elif (
            _is_pure(node)
            and all(dtypes[name].kind in NUMBERS for name in (*node.input, *node.output) if name in dtypes)
            and available.issuperset(filter(None, node.input))
            and all(all(shapes.get(out, (UNKNOWN,))) and _is_small(shapes[out]) for out in node.output)
        ):
            chosen.append(node)
            available.update(node.output)
    if chosen:
        constants.update(_run(model, chosen, {**values, **constants}))
    return constants


def _slice_of(node: onnx.NodeProto) -> slice:
    bounds = {attribute.name: attribute.i for attribute in node.attribute}
    return slice(bounds.get("start", 0), bounds.get("end"))


def _is_pure(node: onnx.NodeProto) -> bool:
    has_body = any(a.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS) for a in node.attribute)
    return not has_body and node.domain in ("", "ai.onnx") and not node.op_type.startswith("Random")


def _run(
    model: onnx.ModelProto, nodes: list[onnx.NodeProto], known: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    produced = {name for node in nodes for name in node.output if name}
    read = {name for node in nodes for name in node.input if name} - produced
    graph = helper.make_graph(
        nodes,
        "constants",
        [],
        [helper.make_empty_tensor_value_info(name) for name in sorted(produced)],
        [numpy_helper.from_array(np.asarray(known[name]), name) for name in sorted(read)],
    )
    small = helper.make_model(graph, opset_imports=model.opset_import, ir_version=10)
    return run_constants(small)


def _replace_by_constants(model: onnx.ModelProto, constants: Mapping[str, np.ndarray]) -> None:
    """Write values for the nodes that make them.

    What is declared of them goes: inference takes a declared type without a shape for all that is known.
    """
    others = [
        n for n in model.graph.node if not (n.output[0] in constants and set(n.output) <= set(constants))
    ]
    del model.graph.node[:]
    model.graph.node.extend(others)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    declared = [value for value in model.graph.value_info if value.name not in constants]
    del model.graph.value_info[:]
    model.graph.value_info.extend(declared)


def _check_all_known(model: onnx.ModelProto, shapes: Mapping[str, Shape]) -> None:
    for node in model.graph.node:
        for output in node.output:
            if output and output not in shapes:
                raise UnsupportedModel(
                    f"the rank of tensor {output!r} cannot be inferred",
                    at=f"node {node.name!r} ({node.op_type})",
                    fix="declare its shape in value_info, or give symbolic sizes with --size NAME=N",
                )
