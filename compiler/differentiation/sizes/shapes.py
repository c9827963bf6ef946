"""Shapes of outputs whose sizes another tensor's values say, where some of these are symbols.

    y = Reshape (x[batch, 6, 8], [batch, 48])    ONNX infers the rank of y alone; here it is [batch, 48]

ONNX's own inference treats targets that are numbers.
"""

from collections.abc import Callable, Mapping, Sequence

from partc.compiler.differentiation.sizes.evaluate import Element, SizeNode
from partc.compiler.differentiation.sizes.symbolic import add, divide, multiply
from partc.compiler.differentiation.tensor_types import Shape, Size

OPEN_END = 2**31 - 1  # a Slice that ends here or beyond ends with its axis


def output_shape(at: SizeNode, shapes: Sequence[Shape | None]) -> Shape | None:
    """Return the shape of a node's first output; None where ONNX's inference knows as much.

    `shapes` are those of the inputs.
    """
    rule = _RULES.get(at.node.op_type)
    return None if rule is None or not shapes else rule(at, shapes)


def product(shape: Sequence[Size]) -> Size:
    """Return how many elements a tensor has."""
    count: Size = 1
    for size in shape:
        count = multiply(count, size)
    return count


def broadcast(left: Shape, right: Shape) -> Shape:
    """Return the shape of two broadcast tensors, sizes that cannot be told unknown."""
    rank = max(len(left), len(right))
    pairs = zip(_pad_rank(left, rank), _pad_rank(right, rank), strict=True)
    return tuple(_meet(a, b) for a, b in pairs)


def _meet(a: Size, b: Size) -> Size:
    if a == b:
        return a
    if a == 1 or b == 1:
        return b if a == 1 else a
    # A size that is neither 1 nor equal has no choice; a symbol has.
    return next((size for size in (a, b) if isinstance(size, int)), None)


def _pad_rank(shape: Shape, rank: int) -> Shape:
    return (1,) * (rank - len(shape)) + shape


def _values(at: SizeNode, index: int) -> list[Element] | None:
    values = at.inputs[index] if index < len(at.inputs) else None
    return None if values is None or values.ndim != 1 else values.tolist()


# ---------------------------------------------------------------- one rule an op


def _constant_of_shape(at: SizeNode, shapes: Sequence[Shape | None]) -> Shape | None:
    target = _values(at, 0)
    return None if target is None else tuple(target)


def _expand(at: SizeNode, shapes: Sequence[Shape | None]) -> Shape | None:
    source, target = shapes[0], _values(at, 1)
    return None if source is None or target is None else broadcast(source, tuple(target))


def _reshape(at: SizeNode, shapes: Sequence[Shape | None]) -> Shape | None:
    source, target = shapes[0], _values(at, 1)
    if target is None:
        return None
    copies = not at.attribute("allowzero", 0)
    sizes: list[Size] = []
    for place, size in enumerate(target):
        copied = size == 0 and copies
        sizes.append((source[place] if source and place < len(source) else None) if copied else size)
    if -1 in sizes:
        rest = product([size for size in sizes if size != -1])
        sizes[sizes.index(-1)] = None if source is None else divide(product(source), rest)
    return tuple(sizes)


def _flatten(at: SizeNode, shapes: Sequence[Shape | None]) -> Shape | None:
    source = shapes[0]
    if source is None:
        return None
    axis = at.attribute("axis", 1)
    axis += len(source) * (axis < 0)
    return product(source[:axis]), product(source[axis:])


def _range(at: SizeNode, shapes: Sequence[Shape | None]) -> Shape | None:
    start, limit, step = (None if values is None else values.item() for values in at.inputs)
    return (limit,) if start == 0 and step == 1 and not isinstance(limit, int) else None


def _tile(at: SizeNode, shapes: Sequence[Shape | None]) -> Shape | None:
    source, repeats = shapes[0], _values(at, 1)
    if source is None or repeats is None:
        return None
    return tuple(multiply(size, count) for size, count in zip(source, repeats, strict=True))


def _slice(at: SizeNode, shapes: Sequence[Shape | None]) -> Shape | None:
    """Axes that are not cut keep their size, and so does one of which everything is taken."""
    source = shapes[0]
    axes = _numbers_or(at, 3, lambda count: list(range(count)), shapes)
    if source is None or axes is None:
        return None
    starts, ends = (_values(at, index) or [None] * len(axes) for index in (1, 2))
    steps = _numbers_or(at, 4, lambda count: [1] * count, shapes) or [0] * len(axes)
    sizes = list(source)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        sizes[axis] = _length(source[axis], start, end) if step == 1 else None
    return tuple(sizes)


def _numbers_or(
    at: SizeNode, index: int, default: Callable[[int], list[int]], shapes: Sequence[Shape | None]
) -> list[int] | None:
    """Return an input's numbers; where it is left out, a default for as many axes as are cut."""
    if index < len(at.node.input) and at.node.input[index]:
        return at.numbers(index)
    count = shapes[1][0] if shapes[1] else None
    return default(count) if isinstance(count, int) else None


def _length(size: Size, start: Element, end: Element) -> Size:
    if start == 0 and (end == size or (isinstance(end, int) and end >= OPEN_END)):
        return size
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int):
        return len(range(*slice(start, end).indices(size)))
    return None


def _concat(at: SizeNode, shapes: Sequence[Shape | None]) -> Shape | None:
    """Equal symbolic parts add up: [batch, 4] and [batch, 4] along axis 0 are [2*batch, 4]."""
    parts = [shape for shape in shapes if shape is not None]
    if len(parts) < len(shapes):
        return None
    axis = at.attribute("axis", 0)
    total = parts[0][axis]
    for part in parts[1:]:
        total = add(total, part[axis])
    if total is None:
        return None
    sizes = list(parts[0])
    sizes[axis] = total
    return tuple(sizes)


Rule = Callable[[SizeNode, Sequence[Shape | None]], Shape | None]
_RULES: Mapping[str, Rule] = {
    "ConstantOfShape": _constant_of_shape,
    "Concat": _concat,
    "Expand": _expand,
    "Flatten": _flatten,
    "Range": _range,
    "Reshape": _reshape,
    "Slice": _slice,
    "Tile": _tile,
}
SHAPED_BY_VALUES = _RULES.keys()
