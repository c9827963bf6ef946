"""Pairs of inputs and outputs whose names say that one is the other's next value.

    W float[4,3] with W_next, new_W, W.updated, W' float[4,3]        proposed
    W with W_next and W_new; W float[4,3] with W_next float[4]       not: nothing tells

Nothing is adopted: a wrong guess would train a wrong model without a word. The message that asks for the
bindings has them ready to paste.
"""

import re
from collections import Counter
from collections.abc import Iterator

import onnx

_NEXT = "next|new|updated|update|out|output|after|post|prime|n|t1|'"
_NOW = "now|old|prev|previous|in|input|before|current|cur|t0|t"
_GAP = r"[._:/@-]*"
_ENDS = re.compile(rf"(.+?){_GAP}(?:{_NEXT}){_GAP}\d*", re.IGNORECASE)
_BEGINS = re.compile(rf"(?:{_NEXT}){_GAP}(.+)", re.IGNORECASE)
_INPUT_ENDS = re.compile(rf"(.+?){_GAP}(?:{_NOW})", re.IGNORECASE)
_INPUT_BEGINS = re.compile(rf"(?:{_NOW}){_GAP}(.+)", re.IGNORECASE)
_Place = tuple[int, str, str]  # how the names differ (0: least), input, output


def propose_state(graph: onnx.GraphProto) -> dict[str, str]:
    """Return input -> output for pairs of equal type that their names make, and no other names make too."""
    inputs, outputs = {info.name: info for info in graph.input}, {info.name: info for info in graph.output}
    pairs = [
        (rank, name, following)
        for following in outputs
        for rank, name in _inputs_of(following, list(inputs))
        if _alike(inputs[name], outputs[following])
    ]
    best = list(_least(_least(pairs, by=2), by=1))
    of_inputs, of_outputs = Counter(place[1] for place in best), Counter(place[2] for place in best)
    return {
        name: following for _, name, following in best if of_inputs[name] == 1 and of_outputs[following] == 1
    }


def _inputs_of(following: str, inputs: list[str]) -> Iterator[tuple[int, str]]:
    """Yield the inputs that an output's name is made from, and how little was taken for it."""
    bases = {match[1].casefold() for form in (_ENDS, _BEGINS) if (match := form.fullmatch(following))}
    for name in inputs:
        if name.casefold() in bases:
            yield 0, name
            continue
        stems = {f[1].casefold() for form in (_INPUT_ENDS, _INPUT_BEGINS) if (f := form.fullmatch(name))}
        if stems & (bases | {following.casefold()}):
            yield 1, name


def _least(pairs: "Iterator[_Place] | list[_Place]", by: int) -> Iterator[_Place]:
    """Yield those places that take least for their input (1), or output (2)."""
    pairs = list(pairs)
    least: dict[object, int] = {}
    for place in pairs:
        least[place[by]] = min(place[0], least.get(place[by], place[0]))
    return (place for place in pairs if place[0] == least[place[by]])


def _alike(one: onnx.ValueInfoProto, other: onnx.ValueInfoProto) -> bool:
    """Tell whether two tensors may have one type: sizes that are not known may be any."""
    first, second = one.type.tensor_type, other.type.tensor_type
    if first.elem_type != second.elem_type:
        return False
    if not (first.HasField("shape") and second.HasField("shape")):
        return True
    sizes, others = list(first.shape.dim), list(second.shape.dim)
    return len(sizes) == len(others) and all(
        not (a.HasField("dim_value") and b.HasField("dim_value")) or a.dim_value == b.dim_value
        for a, b in zip(sizes, others, strict=True)
    )
