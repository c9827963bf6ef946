"""Model files: read and checked. Initializers stay where they lie until somebody asks.

A file on disk may be anything. `read_model` and `check_model` turn every way in which it can be
wrong into a BadModel that names the node or tensor and the repair.
"""

import re
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path

import networkx as nx
import onnx
import onnxruntime
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from partc.compiler.differentiation.tensor_types import without_large_values
from partc.compiler.importing.merge_opsets import merge_opsets
from partc.compiler.model_files.check_bodies import check_bodies
from partc.compiler.model_files.check_tensors import check_tensors
from partc.compiler.model_files.make_dense import make_dense
from partc.compiler.model_files.run_checker import newest_opset, run_checker
from partc.passes.graph.bodies import subgraphs_of
from partc.passes.graph.infer_shapes import limited_memory, try_inference
from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN, SUM_ROWS
from partc.runtime.errors import BadModel, PartcError, UnsupportedModel

PROTOBUF_LIMIT_BYTES = 2**31 - 1  # one protobuf message, by the protobuf specification
# "/onnx/adapters/pad_10_11.h:31: adapt_pad_10_11: Assertion `value > 0` failed: a pad is negative"
_ASSERTION = re.compile(
    r"\S+\.(?:h|cc|cpp):\d+: (?:[\w:~]+: )?Assertion `(?P<condition>.*?)` failed[:.]?\s*(?P<text>.*)",
    re.DOTALL,
)
MODEL = "train.onnx"  # what a plan's folder calls its training graph


# ---------------------------------------------------------------- files


def read_model(path: str | Path) -> onnx.ModelProto:
    """Parse a model file; external data stays in its files. Raises BadModel."""
    path = Path(path)
    if path.is_dir():
        models = sorted(path.glob("*.onnx"), key=lambda model: (model.name != MODEL, model.name))
        such = f", such as {models[0]}" if models else ""
        raise BadModel("a folder, not a file", at=str(path), fix=f"give the path of an ONNX model{such}")
    if not path.is_file():
        raise BadModel("no such file", at=str(path), fix="give the path of an ONNX model")
    size_bytes = path.stat().st_size
    if size_bytes == 0:
        raise BadModel("the file is empty", at=str(path), fix="export the model again")
    if size_bytes > PROTOBUF_LIMIT_BYTES:
        raise BadModel(
            f"{size_bytes} bytes, but one protobuf message holds at most {PROTOBUF_LIMIT_BYTES}",
            at=str(path),
            fix="save it with onnx.save(..., save_as_external_data=True)",
        )
    return _parse(path)


def _parse(path: Path) -> onnx.ModelProto:
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise BadModel(
            "not an ONNX model, or a truncated one",
            at=f"{path} ({path.stat().st_size} bytes)",
            fix="copy or export the file again, and compare its size with the original's",
        ) from error
    if not model.HasField("graph"):
        raise BadModel(
            "a protobuf message without a graph: not an ONNX model, or a truncated one",
            at=str(path),
            fix="give a file that onnx.save or an exporter wrote",
        )
    merge_opsets(model)
    return make_dense(model)


# ---------------------------------------------------------------- ONNX's own transformations


@contextmanager
def onnx_transforming(model: onnx.ModelProto, what: str, fix: str) -> Iterator[None]:
    """Turn whatever ONNX's own code raises on a model into an UnsupportedModel, and bound its memory.

    Its converter, inliner, checker and shape inference are C++ whose exceptions share no class.
    """
    try:
        with limited_memory(model):
            yield
    except PartcError:
        raise
    except Exception as error:
        raise UnsupportedModel(f"{what}: {_reason(error)}", at="ONNX", fix=fix) from error


def _reason(error: Exception) -> str:
    """Return an exception's text without the place in ONNX's sources at which an assertion failed."""
    text = _ASSERTION.sub(lambda match: match["text"] or f"not {match['condition']}", str(error).strip())
    return text or type(error).__name__


# ---------------------------------------------------------------- checks


def check_model(
    model: onnx.ModelProto, folder: Path | None = None, lowered: AbstractSet[str] = frozenset()
) -> None:
    """Raise BadModel at the first thing that is wrong; look at external data if `folder` is given.

    `lowered`: ops of com.microsoft that the caller writes out in standard ops.
    """
    check_tensors(model, folder)
    _check_opsets(model)
    versions = {opset.domain or "": opset.version for opset in model.opset_import}
    functions = {(function.domain, function.name) for function in model.functions}
    functions |= {("com.microsoft", op) for op in lowered}
    initializations = [training.initialization for training in model.training_info]
    for graph in (model.graph, *initializations):
        _check_graph(graph, outer=frozenset(), versions=versions, functions=functions)
    run_checker(model)
    for graph in initializations:
        run_checker(_model_of(graph, model))
    try_inference(without_large_values(model))


def _model_of(graph: onnx.GraphProto, model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model of one graph, which may have no name."""
    alone = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    alone.functions.extend(model.functions)
    alone.graph.CopyFrom(graph)
    alone.graph.name = graph.name or "initialization"
    return alone


def _check_opsets(model: onnx.ModelProto) -> None:
    limit = newest_opset()
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx") and opset.version > limit:
            raise BadModel(
                f"opset {opset.version}, but onnxruntime {onnxruntime.__version__} reads up to {limit}",
                at="opset_import",
                fix=f"export the model with opset {limit} or lower",
            )
    if not any(opset.domain in ("", "ai.onnx") for opset in model.opset_import):
        raise BadModel(
            "no version of the standard operator set",
            at="opset_import",
            fix="add one, as onnx.helper.make_opsetid('', 21)",
        )


def _check_graph(
    graph: onnx.GraphProto,
    *,
    outer: frozenset[str],
    versions: dict[str, int],
    functions: set[tuple[str, str]],
) -> None:
    """`outer` are the tensors that a subgraph sees of the graphs around it."""
    known_names = _given_names(graph) | outer
    makers = _makers(graph, known_names)
    for node in graph.node:
        _check_op(node, versions, functions)
        check_bodies(node, versions.get("", versions.get("ai.onnx", 1)), _place(node))
        for name in node.input:
            if name and name not in known_names and name not in makers:
                raise BadModel(
                    f"input {name!r} is made by no node, and is no graph input and no initializer",
                    at=_place(node),
                    fix=f"add the node or the initializer that makes {name!r}, or correct the name",
                )
    _check_order(graph, makers)
    for info in graph.output:
        if info.name not in makers and info.name not in known_names:
            raise BadModel(
                f"output {info.name!r} is made by no node",
                at=f"outputs of graph {graph.name!r}",
                fix=f"add the node that makes {info.name!r}, or drop the output",
            )
    visible_names = frozenset(known_names | makers.keys())
    for node in graph.node:
        for subgraph in subgraphs_of(node):
            _check_graph(subgraph, outer=visible_names, versions=versions, functions=functions)


def _given_names(graph: onnx.GraphProto) -> set[str]:
    for what, names in (
        ("input", [info.name for info in graph.input]),
        ("initializer", [tensor.name for tensor in graph.initializer]),
        ("output", [info.name for info in graph.output]),
    ):
        repeated = [name for name, times in Counter(names).items() if times > 1]
        if repeated:
            raise BadModel(
                f"two {what}s are called {repeated[0]!r}",
                at=f"{what}s of graph {graph.name!r}",
                fix=f"rename or drop one {what}",
            )
    return {info.name for info in graph.input} | {tensor.name for tensor in graph.initializer}


def _makers(graph: onnx.GraphProto, known_names: set[str]) -> dict[str, onnx.NodeProto]:
    """Return the node that makes each tensor."""
    makers: dict[str, onnx.NodeProto] = {}
    for node in graph.node:
        for name in filter(None, node.output):
            if name in makers or name in known_names:
                other = _place(makers[name]) if name in makers else "the graph's inputs or initializers"
                raise BadModel(
                    f"tensor {name!r} is made twice",
                    at=f"{_place(node)} and {other}",
                    fix="rename one of the two outputs and what reads it",
                )
            makers[name] = node
    return makers


def _check_op(node: onnx.NodeProto, versions: dict[str, int], functions: set[tuple[str, str]]) -> None:
    domain = "" if node.domain == "ai.onnx" else node.domain
    if (node.domain, node.op_type) in functions:
        is_sum = (node.domain, node.op_type) == (FUNCTION_DOMAIN, SUM_ROWS)
        if is_sum and (len(node.input), len(node.output)) != (2, 2):
            raise BadModel(
                f"{len(node.input)} inputs and {len(node.output)} outputs of {SUM_ROWS}, which has 2 of each",
                at=_place(node),
                fix="differentiate the forward model again",
            )
        return
    version = versions.get(domain)
    if version is not None and not 0 < version < 2**31:
        raise BadModel(
            f"version {version} of domain {domain!r}", at="opset_import", fix="import a version that exists"
        )
    if version is None:
        raise BadModel(
            f"op {node.op_type!r} of domain {domain!r}, which the model does not import",
            at=_place(node),
            fix=f"add domain {domain!r} to opset_import, or correct the node's domain",
        )
    try:
        onnx.defs.get_schema(node.op_type, version, domain)
    except onnx.defs.SchemaError as error:
        raise BadModel(
            f"unknown op {node.op_type!r} (domain {domain or 'ai.onnx'!r}, opset {version})",
            at=_place(node),
            fix="correct the op or the opset, replace it by standard ops, or add a model-local function",
        ) from error


def _check_order(graph: onnx.GraphProto, makers: dict[str, onnx.NodeProto]) -> None:
    position = {id(node): index for index, node in enumerate(graph.node)}
    edges = [
        (position[id(makers[name])], reader)
        for reader, node in enumerate(graph.node)
        for name in node.input
        if name in makers
    ]
    if all(maker < reader for maker, reader in edges):
        return
    network = nx.DiGraph(edges)
    try:
        cycle = nx.find_cycle(network)
    except nx.NetworkXNoCycle:
        maker, reader = next(edge for edge in edges if edge[0] >= edge[1])
        raise BadModel(
            f"nodes are out of order: {_place(graph.node[reader])} reads what a later node makes",
            at=_place(graph.node[maker]),
            fix="sort the nodes, as onnx_graphsurgeon's Graph.toposort() does",
        ) from None
    names = " -> ".join(_place(graph.node[maker]) for maker, _ in cycle)
    raise BadModel(
        f"{len(cycle)} nodes wait for each other in a cycle",
        at=names,
        fix="cut the cycle: one of these nodes must read a variable or an earlier tensor instead",
    )


def _place(node: onnx.NodeProto) -> str:
    if node.name:
        return f"node {node.name!r} ({node.op_type})"
    return f"node {node.op_type} -> {next(iter(node.output), '')!r}"
