"""Give ranks what windows read of parts of any size: of others, and of the padding beyond the tensor's ends.

    3 windows of 3 on 7 rows, stride 2, a row of padding, on 2 ranks: rank 0 has a b c d, rank 1 e f g

    rank 0    0 a b c d    windows 0, 1           of a b c d, behind a row that pads
    rank 1    d e f        window 2               of d, which rank 0 sends, e and f

Every rank is sent what it lacks, by whoever has it (exchange.py), and pads what lies beyond the tensor's
ends: how much is data, so that all ranks share one segment.
"""

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.layouts.layouts import Overlapping
from partc.passes.layouts.reshard import Transfer
from partc.passes.lowering.lowered_graph import Number, PlaceNumber
from partc.passes.lowering.lowering import Lowering
from partc.passes.rules.sharding_rule import Fill
from partc.runtime.plan.program import Site

Pads = dict[int, tuple[Number, Number]]  # tensor axis -> entries added before and behind; fewer than 0: cut


def pad_overlapping(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    """Return the value that holds `tensor` with parts that overlap and reach beyond the tensor's ends."""
    target, pads = transfer.target, Pads()
    fill = np.zeros((), lowering.facts.dtypes[tensor])
    for axis, overlapping in target.overlapping():
        if any(map(any, overlapping.pads)):
            pads[overlapping.axis] = by_place(axis, overlapping.pads)
            fill = fill_value(overlapping.fill, fill.dtype)
    inner = lowering.need(tensor, transfer.source)
    return pad(lowering, inner, lowering.value_name(tensor, target), pads, fill, target.site)


def crop(lowering: Lowering, tensor: str, transfer: Transfer) -> gs.Tensor:
    """Cut out what each rank reads of what is whole along an axis of the mesh."""
    target, overlapping = transfer.target, transfer.target.along(transfer.axis)
    assert isinstance(overlapping, Overlapping)
    whole = lowering.need(tensor, transfer.source)
    cuts = tuple((-start, stop - overlapping.size) for start, stop in overlapping.ranges)
    fill = np.zeros((), lowering.facts.dtypes[tensor])
    name = lowering.value_name(tensor, target)
    return pad(lowering, whole, name, {overlapping.axis: by_place(transfer.axis, cuts)}, fill, target.site)


def by_place(mesh_axis: int, pads: tuple[tuple[int, int], ...]) -> tuple[Number, Number]:
    """Return how many entries are added before and behind, by a rank's place along an axis of the mesh."""
    before, after = (tuple(number) for number in zip(*pads, strict=True))
    return PlaceNumber(mesh_axis, before), PlaceNumber(mesh_axis, after)


def pad(
    lowering: Lowering, tensor: gs.Tensor, name: str, pads: Pads, fill: np.ndarray, site: Site
) -> gs.Tensor:
    """Return a tensor with entries added to its axes, or taken from them."""
    rank = len(lowering.out.shapes[name])
    numbers = [pads.get(axis, (0, 0))[end] for end in (0, 1) for axis in range(rank)]
    operands = [tensor, lowering.numbers(f"{name}.pads", numbers, site), gs.Constant(f"{name}.fill", fill)]
    return lowering.out.emit("Pad", operands, name, tensor.dtype, site)


def fill_value(fill: Fill, dtype: np.dtype) -> np.ndarray:
    """Return what pads a tensor's ends: a scalar of its element type.

    One above the lowest number, which MaxPool begins with: a window of nothing but padding has a winner too.
    """
    if fill == "zero":
        return np.zeros((), dtype)
    if dtype.kind in "iu":
        return np.array(np.iinfo(dtype).min + 1 if dtype.kind == "i" else 0, dtype)
    lowest = np.array(np.finfo(dtype).min, dtype)
    return np.asarray(np.nextafter(lowest, np.zeros((), dtype)))
