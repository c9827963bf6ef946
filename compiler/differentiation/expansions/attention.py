"""Attention and RotaryEmbedding written as primitive ops. No batch size is held.

    scores = cap(Q K^T scale) + mask         Y = softmax(scores) V

Query i is at position i + offset among the keys: the offset is the length of the past, or what the keys
that are no padding have more than the queries. It sees keys up to there (is_causal), or of a window
around it. A query that sees no key gives 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from partc.compiler.differentiation.forward_node import ForwardNode
from partc.runtime.errors import UnsupportedModel

PAST_KEY, PAST_VALUE, LENGTHS = 4, 5, 6
WITH_CAP, WITH_MASK, PROBABILITIES = 1, 2, 3  # what qk_matmul_output_mode shows; else the bare product


@dataclass(frozen=True, slots=True)
class _Heads:
    """Queries [b, heads, q, e], keys [b, heads, k, e], values [b, heads, k, v]."""

    queries: str
    keys: str
    values: str
    present: tuple[str, str]  # keys and values before groups of queries share them
    count: int
    head_size: int


def expand_attention(at: ForwardNode) -> Sequence[str]:
    """Emit Attention (opset 23 to 25)."""
    heads = _heads(at)
    product = at.op("MatMul", heads.queries, at.op("Transpose", heads.keys, perm=[0, 1, 3, 2]))
    scale = at.number("scale", 0.0) or 1 / math.sqrt(heads.head_size)
    qk_outputs = {0: (scores := at.op("Mul", product, at.scalar(scale, like=at.x(0))))}
    if cap := at.number("softcap", 0.0):
        softcap = at.scalar(cap, like=at.x(0))
        scores = at.op("Mul", at.op("Tanh", at.op("Div", scores, softcap)), softcap)
    qk_outputs[WITH_CAP] = scores
    probabilities, qk_outputs[WITH_MASK] = _probabilities(at, scores, heads)
    qk_outputs[PROBABILITIES] = probabilities
    result = at.op("MatMul", probabilities, heads.values)
    if at.rank(at.x(0)) == 3:
        result = at.op("Reshape", at.op("Transpose", result, perm=[0, 2, 1, 3]), at.build.ints(0, 0, -1))
    return result, *heads.present, qk_outputs[at.integer("qk_matmul_output_mode", 0)]


# ---------------------------------------------------------------- heads


def _heads(at: ForwardNode) -> _Heads:
    if at.rank(at.x(0)) == 3:
        count, key_value_count = at.integer("q_num_heads", 0), at.integer("kv_num_heads", 0)
        head_size = at.static_sizes(at.x(0), 2)[0] // count
        queries, keys, values = (
            _apart(at, at.x(index), n)
            for index, n in ((0, count), (1, key_value_count), (2, key_value_count))
        )
    else:
        queries, keys, values = (at.x(index) for index in range(3))
        count, key_value_count = (_size(at, index, 1) for index in range(2))
        head_size = _size(at, 0, 3)
    if at.x(PAST_KEY):
        keys = at.op("Concat", at.x(PAST_KEY), keys, axis=2)
        values = at.op("Concat", at.x(PAST_VALUE), values, axis=2)
    present = keys, values
    if count != key_value_count:
        keys, values = (_repeat(at, index, present[index - 1], (count, key_value_count)) for index in (1, 2))
    return _Heads(queries, keys, values, present, count, head_size)


def _size(at: ForwardNode, index: int, axis: int) -> int:
    """Return a size that must be known."""
    size = at.shape(at.x(index))[axis]
    if isinstance(size, int):
        return size
    raise UnsupportedModel(
        f"axis {axis} of tensor {at.x(index)!r} must be known, but is {size!r}",
        at=at.place,
        fix="export the model with this size fixed",
    )


def _apart(at: ForwardNode, tensor: str, heads: int) -> str:
    """[b, s, heads e] to [b, heads, s, e]."""
    return at.op("Transpose", at.op("Reshape", tensor, at.build.ints(0, 0, heads, -1)), perm=[0, 2, 1, 3])


def _repeat(at: ForwardNode, index: int, tensor: str, heads: tuple[int, int]) -> str:
    """Let each of the shared heads, of input `index`, serve count / shared heads of queries in a row."""
    count, key_value_count = heads
    if key_value_count == 0 or count % key_value_count:
        raise UnsupportedModel(
            f"{count} heads of queries cannot share {key_value_count} heads of keys",
            at=at.place,
            fix="make q_num_heads a multiple of kv_num_heads",
        )
    wide = at.op("Unsqueeze", tensor, at.build.ints(2))
    wide = at.op("Expand", wide, at.build.ints(1, 1, count // key_value_count, 1, 1))
    head_size = _size(at, index, -1) // (key_value_count if at.rank(at.x(0)) == 3 else 1)
    return at.op("Reshape", wide, at.build.ints(0, count, -1, head_size))


# ---------------------------------------------------------------- mask and softmax


def _probabilities(at: ForwardNode, scores: str, heads: _Heads) -> tuple[str, str]:
    """Return the softmax of the masked scores, and the masked scores."""
    mask = _mask(at, heads)
    masked = scores if mask is None else at.op("Add", scores, mask)
    scores_to_normalize, hidden = masked, None
    if mask is not None and _may_hide_all(at):
        # Nothing may become NaN, for 0 times NaN is no gradient.
        most = at.op("ReduceMax", mask, at.build.ints(-1), keepdims=1)
        hidden = at.op("Equal", most, at.scalar(-np.inf, like=at.x(0)))
        masked = at.op("Where", hidden, at.scalar(0, like=at.x(0)), masked)
    precision = at.integer("softmax_precision", 0)
    element = at.types[at.x(0)].element
    if precision not in (0, element):
        masked = at.op("Cast", masked, to=precision)
    probabilities = at.op("Softmax", masked, axis=-1)
    if precision not in (0, element):
        probabilities = at.op("Cast", probabilities, to=element)
    if hidden is not None:
        probabilities = at.op("Where", hidden, at.scalar(0, like=at.x(0)), probabilities)
    return probabilities, scores_to_normalize


def _may_hide_all(at: ForwardNode) -> bool:
    """Tell whether a query may see no key: without masks and windows it sees the first."""
    return bool(at.x(3) or at.x(LENGTHS) or at.integer("left_window_size", -1) >= 0)


def _mask(at: ForwardNode, heads: _Heads) -> str | None:
    """Return what is added to the scores, broadcasting to [b, heads, q, k]: 0, or -inf where hidden."""
    parts = []
    if at.x(3):
        parts.append(_given_mask(at, heads))
    parts += [_bias(at, condition) for condition in _visibility_conditions(at, heads)]
    if at.x(LENGTHS):
        keys = at.op("Range", *_bounds(at, heads.keys))
        parts.append(_bias(at, at.op("Less", keys, _per_sample(at, at.x(LENGTHS)))))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else at.op("Sum", *parts)


def _given_mask(at: ForwardNode, heads: _Heads) -> str:
    mask = at.x(3)
    is_bool = at.types[mask].element == TensorProto.BOOL
    if is_bool:
        mask = _bias(at, mask)
    mask_length, keys = at.shape(at.x(3))[-1], at.shape(at.x(1))[-2]
    past = at.shape(at.x(PAST_KEY))[2] if at.x(PAST_KEY) else 0
    if isinstance(mask_length, int) and isinstance(keys, int) and isinstance(past, int):
        missing = keys + past - mask_length
        if mask_length == 1 or missing <= 0:
            return mask
        rank = at.rank(at.x(3))
        amounts = at.build.ints(*(0,) * (2 * rank - 1), missing)
        return at.op("Pad", mask, amounts, at.scalar(-np.inf, like=at.x(0)))
    return mask


def _bias(at: ForwardNode, visible: str) -> str:
    return at.op("Where", visible, at.scalar(0, like=at.x(0)), at.scalar(-np.inf, like=at.x(0)))


def _visibility_conditions(at: ForwardNode, heads: _Heads) -> list[str]:
    """Return bools [q, k] or [b, 1, q, k]: true where the key's position lies in the query's window."""
    before, after = (at.integer(f"{side}_window_size", -1) for side in ("left", "right"))
    if at.integer("is_causal", 0):
        after = 0
    conditions = []
    if after >= 0:
        last = _positions(at, heads)
        if after:
            last = at.op("Add", last, at.build.constant(np.array(after, np.int64)))
        conditions.append(at.op("LessOrEqual", at.op("Range", *_bounds(at, heads.keys)), last))
    if before >= 0:
        first = at.op("Sub", _positions(at, heads), at.build.constant(np.array(before, np.int64)))
        conditions.append(at.op("GreaterOrEqual", at.op("Range", *_bounds(at, heads.keys)), first))
    return conditions


def _positions(at: ForwardNode, heads: _Heads) -> str:
    """Return the queries' positions among the keys, int64[q, 1] or [b, 1, q, 1]."""
    queries = at.op("Unsqueeze", at.op("Range", *_bounds(at, heads.queries)), at.build.ints(1))
    if at.x(PAST_KEY):
        return at.op("Add", queries, at.op("Shape", at.x(PAST_KEY), start=2, end=3))
    if at.x(LENGTHS):
        offset = at.op("Sub", at.x(LENGTHS), at.op("Shape", heads.queries, start=2, end=3))
        return at.op("Add", queries, _per_sample(at, offset))
    return queries


def _bounds(at: ForwardNode, tensor: str) -> tuple[str, str, str]:
    """Return 0, the length of the sequence in [b, heads, s, e], and 1."""
    length = at.op("Squeeze", at.op("Shape", tensor, start=2, end=3))
    return at.build.constant(np.array(0, np.int64)), length, at.build.constant(np.array(1, np.int64))


def _per_sample(at: ForwardNode, values: str) -> str:
    """[b] to [b, 1, 1, 1]."""
    return at.op("Unsqueeze", values, at.build.ints(1, 2, 3))


# ---------------------------------------------------------------- rotary embedding


def expand_rotary_embedding(at: ForwardNode) -> Sequence[str]:
    """Emit RotaryEmbedding: pairs (x1, x2) of a head's entries turn by the angle of their position.

    (cos x1 - sin x2, sin x1 + cos x2)
    """
    x, flat = at.x(0), at.rank(at.x(0)) == 3
    if flat:
        heads = at.integer("num_heads", 0)
        x = at.op("Reshape", x, at.build.ints(0, 0, heads, -1))
        head_size = at.static_sizes(at.x(0), 2)[0] // heads
    else:
        head_size = _size(at, 0, 3)
    rotary_size = at.integer("rotary_embedding_dim", 0) or head_size
    rest: tuple[str, ...] = ()
    if rotary_size < head_size:
        sizes = at.build.ints(rotary_size, head_size - rotary_size)
        x, *last = at.build.call("Split", (x, sizes), 2, axis=-1)
        rest = tuple(last)
    # Samples, positions and heads: [b, s, heads, e] if flat, else [b, heads, s, e].
    cos, sin = (_angles(at, at.x(index), 2 if flat else 1) for index in (1, 2))
    result = _rotate(at, x, (cos, sin), rotary_size)
    if rest:
        result = at.op("Concat", result, *rest, axis=-1)
    return (at.op("Reshape", result, at.build.ints(0, 0, -1)) if flat else result,)


def _angles(at: ForwardNode, cache: str, heads_axis: int) -> str:
    """Return [b, s, 1, e / 2] or [b, 1, s, e / 2], read from the cache at the positions if there are any."""
    if at.x(3):
        cache = at.op("Gather", cache, at.x(3), axis=0)
    return at.op("Unsqueeze", cache, at.build.ints(heads_axis))


def _rotate(at: ForwardNode, x: str, angles: tuple[str, str], rotary_size: int) -> str:
    cos, sin = angles
    interleaved = at.integer("interleaved", 0)
    if interleaved:
        pairs = at.op("Reshape", x, at.build.ints(0, 0, 0, rotary_size // 2, 2))
        columns = at.build.call("Split", (pairs,), 2, axis=-1, num_outputs=2)
        x1, x2 = (at.op("Squeeze", column, at.build.ints(-1)) for column in columns)
    else:
        x1, x2 = at.build.call("Split", (x,), 2, axis=-1, num_outputs=2)
    first = at.op("Sub", at.op("Mul", cos, x1), at.op("Mul", sin, x2))
    second = at.op("Add", at.op("Mul", sin, x1), at.op("Mul", cos, x2))
    if not interleaved:
        return at.op("Concat", first, second, axis=-1)
    columns = tuple(at.op("Unsqueeze", half, at.build.ints(-1)) for half in (first, second))
    return at.op("Reshape", at.op("Concat", *columns, axis=-1), at.build.ints(0, 0, 0, rotary_size))
