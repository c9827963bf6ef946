"""What a node of a segment is to a stopwatch: its operator, attributes, and what it reads, as a text.

    Conv(float32[8,64,56,56], float32[64,64,3,3], pads=[1, 1, 1, 1])      two operands and an attribute
    Mul(hot(float32[32,512]), 0)                                           a square of what lies in the cache
    ReduceSum(float32[32,512], int64[1](-1), keepdims=1)                   a small constant, by its values
    MatMul(Transpose(float32[512,32], perm=[1, 0]), float32[512,64])       read as it lies, transposed
    partc.SumRows(int64[128], float32[128,64], body='3f29c0d1')[2]         a function with two results

Nodes of equal texts take equal time. The text is a Python expression; from it the kernel is made again.
Names are left out, and the order of attributes. A node has none whose sizes follow the data or the values of
an operand, that only views what it reads, or that holds a graph.
"""

import ast
import hashlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, prod

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from partc.runtime.plan.program import ABSORBED

# Larger results stay in no cache, unless they are computed in blocks (block_updates.py): not by one kernel.
MOST_HOT_ELEMENTS = 1 << 20
MOST_VALUES = 8  # of a constant of integers that is told by its values: axes, say
TOLD_BY_VALUE = frozenset({"Pow"})  # which has a kernel of its own for squares
PRODUCTS = frozenset({"MatMul", "Gemm"})
# They take next to no time, whatever their sizes.
WITHOUT_KERNEL = frozenset(
    {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Size", "Constant"}
)
SIZED_BY_VALUES = frozenset(
    {"Expand", "ConstantOfShape", "Tile", "Slice", "Split", "Pad", "Resize", "Range", "OneHot", "EyeLike"}
)

Attribute = tuple[str, object]
Shape = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a kernel reads.

    values      of a small constant
    is_hot      it lies in the cache
    transposed  the permutation of a Transpose that the kernel reads through
    """

    dtype: str
    shape: tuple[int, ...]
    values: tuple[object, ...] | None = None
    is_hot: bool = False
    transposed: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return the operand's part of a key."""
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]" if self.shape else self.dtype
        if self.values is not None:
            text += f"({', '.join(map(repr, self.values))})"
        if self.transposed:
            text = f"Transpose({text}, perm={list(self.transposed)})"
        return f"hot({text})" if self.is_hot else text


@dataclass(frozen=True, slots=True)
class Kernel:
    """A node apart from its graph. An operand that is a number is the same tensor as that operand."""

    domain: str
    op: str
    operands: tuple[Operand | int | None, ...]
    attributes: tuple[Attribute, ...] = ()
    body: str = ""  # of a function: a part of its hash
    results: int = 1
    is_hot: bool = False  # its result stays in the cache

    @property
    def key(self) -> str:
        """Return the text."""
        name = f"{self.domain}.{self.op}" if self.domain else self.op
        named = [f"{key}={value!r}" for key, value in self.attributes]
        named += [f"body={self.body!r}"] if self.body else []
        text = f"{name}({', '.join([*map(str, self.operands), *named])})"
        text += f"[{self.results}]" if self.results > 1 else ""
        return f"hot({text})" if self.is_hot else text


# ---------------------------------------------------------------- of nodes


class KernelNamer:
    """Names the kernels of chunks.

    shapes       value -> one rank's
    read_shapes  (node, place of an operand) -> as it is read there, where values do not tell it
    """

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        functions: Mapping[str, onnx.FunctionProto],
        read_shapes: Mapping[tuple[str, int], Shape],
    ) -> None:
        self._shapes = shapes
        self._read_shapes = read_shapes
        self._functions = functions
        self._bodies: dict[str, str] = {}

    def key(self, node: gs.Node, hot: AbstractSet[str], transposes: Mapping[str, gs.Node]) -> str | None:
        """Return a node's key, None where it has none. `transposes`: those that vanish, by their results."""
        if node.op == "Transpose" and node.outputs[0].name in transposes:
            return ABSORBED
        if node.op in WITHOUT_KERNEL | SIZED_BY_VALUES or not node.outputs:
            return None
        attributes = _attributes(node)
        results = [tensor for tensor in node.outputs if tensor.name]
        operands = self._operands(node, hot, transposes if node.op in PRODUCTS else {})
        if attributes is None or operands is None or results != node.outputs[: len(results)]:
            return None
        is_hot = results[0].name in hot
        if is_hot and not self._fits_cache(results[0]):
            return None
        body = self._body(node.op) if node.op in self._functions else ""
        return _key(Kernel(node.domain or "", node.op, operands, attributes, body, len(results), is_hot))

    def _operands(
        self, node: gs.Node, hot: AbstractSet[str], transposes: Mapping[str, gs.Node]
    ) -> tuple[Operand | int | None, ...] | None:
        operands: list[Operand | int | None] = []
        places: dict[str, int] = {}
        for place, tensor in enumerate(node.inputs):
            if not tensor.name:
                operands.append(None)
                continue
            if tensor.name in places:
                operands.append(places[tensor.name])
                continue
            places[tensor.name] = place
            operand = self._operand(node, place, tensor.name in hot, transposes.get(tensor.name))
            if operand is None:
                return None
            operands.append(operand)
        return tuple(operands)

    def _operand(self, node: gs.Node, place: int, is_hot: bool, transpose: gs.Node | None) -> Operand | None:
        tensor = node.inputs[place]
        if isinstance(tensor, gs.Constant):
            values = np.asarray(tensor.values)
            is_told = values.dtype.kind in "iub" or node.op in TOLD_BY_VALUE
            return Operand(values.dtype.name, values.shape, _values(values) if is_told else None)
        shape = self._read_shapes.get((node.name, place), self._shapes.get(tensor.name))
        if shape is None or tensor.dtype is None or (is_hot and not self._fits_cache(tensor)):
            return None
        sizes = tuple(size for size in shape if size)
        if len(sizes) < len(shape):
            return None
        permutation = () if transpose is None else tuple(transpose.attrs["perm"])
        if permutation:
            sizes = tuple(sizes[permutation.index(axis)] for axis in range(len(sizes)))
        return Operand(np.dtype(tensor.dtype).name, sizes, None, is_hot, permutation)

    def _fits_cache(self, tensor: gs.Tensor) -> bool:
        return prod(size or 1 for size in self._shapes.get(tensor.name, ())) < MOST_HOT_ELEMENTS

    def _body(self, function: str) -> str:
        if function not in self._bodies:
            self._bodies[function] = body_of(function, self._functions)
        return self._bodies[function]


def body_of(name: str, functions: Mapping[str, onnx.FunctionProto]) -> str:
    """Return what tells a function's body from others': a part of the hash of it and of those it calls."""
    digest = hashlib.sha256()
    waiting, seen = [name], {name}
    while waiting:
        function = functions[waiting.pop()]
        digest.update(function.SerializeToString(deterministic=True))
        called = {node.op_type for node in function.node if node.op_type in functions} - seen
        seen |= called
        waiting += sorted(called)
    return digest.hexdigest()[:8]


def absorbed_transposes(nodes: Sequence[gs.Node], read_later: AbstractSet[str]) -> dict[str, gs.Node]:
    """Return the Transposes of a chunk that vanish in the products that read them, by their results.

    ONNX Runtime, like transpose_products.py, reads a matrix as it lies.
    """
    transposes = {
        node.outputs[0].name: node
        for node in nodes
        if node.op == "Transpose" and node.outputs[0].name not in read_later and _swaps_last(node)
    }
    for node in nodes:
        if node.op not in PRODUCTS:
            for tensor in node.inputs:
                transposes.pop(tensor.name, None)
    return transposes


def _swaps_last(node: gs.Node) -> bool:
    order = list(node.attrs.get("perm", ()))
    count = len(order)
    return count > 1 and order == [*range(count - 2), count - 1, count - 2]


def _attributes(node: gs.Node) -> tuple[Attribute, ...] | None:
    """Return a node's attributes in order, None where one is more than numbers and words."""
    attributes: list[Attribute] = []
    for name, value in sorted(node.attrs.items()):
        plain = _plain(value)
        if plain is None:
            return None
        attributes.append((name, plain))
    return tuple(attributes)


def _plain(value: object) -> object | None:
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return None if None in parts else _Listed(parts)
    return None


class _Listed(tuple[object, ...]):
    """Values that are written as a list, and can be hashed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(list(self))


def _values(values: np.ndarray) -> tuple[object, ...] | None:
    """Return the values of a small constant of finite numbers."""
    if values.size > MOST_VALUES or values.dtype.kind not in "iufb":
        return None
    return tuple(values.ravel().tolist()) if np.isfinite(values.astype(np.float64)).all() else None


@lru_cache(maxsize=1 << 16)
def _key(kernel: Kernel) -> str:
    return kernel.key


# ---------------------------------------------------------------- of texts


def parse_kernel(key: str) -> Kernel:
    """Return the kernel that a key tells. Raises ValueError where it is none."""
    try:
        is_hot, tree = _unwrapped(ast.parse(key, mode="eval").body)
        results = 1
        if isinstance(tree, ast.Subscript):
            results, tree = int(ast.literal_eval(tree.slice)), tree.value
        call = _call(tree)
        domain, _, op = ast.unparse(call.func).rpartition(".")
        named = {word.arg or "": _literal(word.value) for word in call.keywords}
        body = str(named.pop("body", ""))
        operands = tuple(map(_parse_operand, call.args))
    except (SyntaxError, TypeError, IndexError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a kernel: {key}") from error
    return Kernel(domain, op, operands, tuple(sorted(named.items())), body, results, is_hot)


def _call(tree: ast.expr, name: str = "") -> ast.Call:
    """Return what calls something, or something of this name. Raises ValueError for anything else."""
    if not isinstance(tree, ast.Call) or (name and ast.unparse(tree.func) != name):
        raise ValueError(f"not {name or 'a kernel'}: {ast.unparse(tree)}")
    return tree


def _unwrapped(tree: ast.expr) -> tuple[bool, ast.expr]:
    is_hot = isinstance(tree, ast.Call) and ast.unparse(tree.func) == "hot"
    return is_hot, _call(tree).args[0] if is_hot else tree


def _literal(tree: ast.expr) -> object:
    value = ast.literal_eval(tree)
    return _Listed(value) if isinstance(value, list) else value


def _parse_operand(tree: ast.expr) -> Operand | int | None:
    if isinstance(tree, ast.Constant):
        if tree.value is None or isinstance(tree.value, int):
            return tree.value
        raise ValueError(f"no operand: {tree.value!r}")
    is_hot, tree = _unwrapped(tree)
    transposed: tuple[int, ...] = ()
    if isinstance(tree, ast.Call) and tree.keywords:
        through = _call(tree, "Transpose")
        transposed, tree = tuple(ast.literal_eval(through.keywords[0].value)), through.args[0]
    values: tuple[object, ...] | None = None
    if isinstance(tree, ast.Call):
        values, tree = tuple(ast.literal_eval(value) for value in tree.args), tree.func
    dtype, _, sizes = ast.unparse(tree).rstrip("]").partition("[")
    if not dtype.isidentifier():
        raise ValueError(f"no element type: {dtype}")
    shape = tuple(int(size) for size in sizes.strip("()").split(",") if size.strip())
    return Operand(dtype, shape, values, is_hot, transposed)
