"""Types of a graph's tensors, sizes as products of its symbolic sizes: a merged [T, batch] is "20*batch".

ONNX's inference loses a symbol where a Reshape merges or moves it. So shapes are inferred with primes in the
symbols' places, and the primes are found again in the sizes; a second inference, with other primes, confirms.
"""

from collections.abc import Mapping

import onnx

from partc.compiler.differentiation.tensor_types import Size, TensorType, infer_types

# No model has a size that such a prime divides.
_PRIMES = (99_991, 99_989, 99_971, 99_961, 99_929, 99_923, 99_907, 99_901, 99_881, 99_877, 99_871, 99_859)


def symbolic_types(model: onnx.ModelProto) -> dict[str, TensorType]:
    """Return the type of every tensor; a size is None where it is no product of symbols and a number."""
    symbols = _symbols(model.graph)
    primes = dict(zip(symbols, _PRIMES, strict=False))
    others = dict(zip(symbols, _PRIMES[::-1], strict=False))
    if len(symbols) > len(_PRIMES):
        return infer_types(model)
    first, second = infer_types(_with_sizes(model, primes)), infer_types(_with_sizes(model, others))
    return {name: _spell_out(type_, second[name], primes, others) for name, type_ in first.items()}


def _symbols(graph: onnx.GraphProto) -> list[str]:
    dims = [dim for info in graph.input for dim in info.type.tensor_type.shape.dim]
    return sorted({dim.dim_param for dim in dims if dim.dim_param})


def _with_sizes(model: onnx.ModelProto, sizes: Mapping[str, int]) -> onnx.ModelProto:
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    for info in probe.graph.input:
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = sizes[dim.dim_param]
    for info in probe.graph.output:
        info.type.tensor_type.ClearField("shape")
    del probe.graph.value_info[:]
    return probe


def _spell_out(
    first: TensorType, second: TensorType, primes: Mapping[str, int], others: Mapping[str, int]
) -> TensorType:
    if first.shape is None or second.shape is None or len(first.shape) != len(second.shape):
        return TensorType(first.element, None)
    sizes = zip(first.shape, second.shape, strict=True)
    return TensorType(first.element, tuple(_product(one, other, primes, others) for one, other in sizes))


def _product(one: Size, other: Size, primes: Mapping[str, int], others: Mapping[str, int]) -> Size:
    """Return the product of symbols that gives both sizes."""
    if not isinstance(one, int) or not isinstance(other, int):
        return None
    factors = []
    for symbol, prime in primes.items():
        while one % prime == 0 and other % others[symbol] == 0 and one:
            one, other = one // prime, other // others[symbol]
            factors.append(symbol)
    if one != other:
        return None
    return "*".join(([str(one)] if one != 1 else []) + factors) if factors else one
