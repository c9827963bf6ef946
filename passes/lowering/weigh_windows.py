"""Let windows of an average count for what it counts, where it is made as if it counted all that they read.

    AveragePool of 3 entries, padding not counted     a b | c d on 2 ranks

    rank 0    0 a b c    means of three (0 + a + b) / 3 and (a + b + c) / 3    times 3 / 2 and 3 / 3
    rank 1    b c d 0                   (b + c + d) / 3     (c + d + 0) / 3    times 3 / 3 and 3 / 2

The weight of a window is its taps over the entries that count. Axes are weighed one after the other; each
rank cuts those of its windows out of all, so that ranks share their segments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.lowering.lowered_graph import PlaceNumber, constant
from partc.passes.lowering.lowering import Lowering
from partc.passes.windows.windows import CountedPadding, Windows, averages_alike, entries_averaged
from partc.runtime.plan.program import Site

Ranges = tuple[
    tuple[int, int], ...
]  # by place along a mesh axis: the first entry, and the one behind the last


@dataclass(frozen=True, slots=True)
class SpaceParts:
    """The parts of an axis of space that the ranks along a mesh axis have."""

    mesh_axis: int
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class WindowWeights:
    """What windows along an axis of a tensor count for: each rank has those in the range of its place.

    Windows before the first, or behind the last, are of no account. `parts` None: all ranks have all.
    """

    axis: int
    values: tuple[float, ...]
    parts: SpaceParts | None = None


def window_weights(
    windows: Windows, counted: CountedPadding, parts: Mapping[int, SpaceParts], all_axes: bool = False
) -> tuple[WindowWeights, ...]:
    """Return the weights of an average's windows along the axes of which ranks have parts, or all axes.

    None along an axis where all windows count alike.
    """
    return tuple(
        WindowWeights(axis + 2, _shares(windows, axis, counted), parts.get(axis))
        for axis in range(len(windows.kernel))
        if (axis in parts or all_axes) and not averages_alike(windows, axis, counted)
    )


def _shares(windows: Windows, axis: int, counted: CountedPadding) -> tuple[float, ...]:
    taps = windows.kernel[axis]
    return tuple(taps / max(1, entries) for entries in entries_averaged(windows, axis, counted))


def weigh(
    lowering: Lowering,
    tensor: gs.Tensor,
    name: str,
    weights: Sequence[WindowWeights],
    rank: int,
    site: Site,
) -> gs.Tensor:
    """Return the value `name`: what windows make, or a gradient of it, each times its window's weights.

    `rank`: the number of the tensor's axes.
    """
    out = lowering.out
    for number, of_axis in enumerate(weights, 1):
        result = name if number == len(weights) else f"{name}.along{of_axis.axis}"
        if tensor.name in out.shapes:
            out.shapes.setdefault(result, out.shapes[tensor.name])
        out.nbytes.setdefault(result, out.nbytes.get(tensor.name, 0))
        own = _weights_of_rank(lowering, of_axis, rank, result, tensor.dtype, site)
        tensor = out.emit("Mul", [tensor, own], result, tensor.dtype, site)
    return tensor


def _weights_of_rank(
    lowering: Lowering, weights: WindowWeights, rank: int, name: str, dtype: np.dtype, site: Site
) -> gs.Tensor:
    """Return a rank's [1, .., windows, .., 1]."""
    shape = [1] * rank
    shape[weights.axis] = -1
    if weights.parts is None:
        return gs.Constant(f"{name}.weights", np.array(weights.values, dtype).reshape(shape))
    ranges = weights.parts.ranges
    before = max(0, *(-start for start, _ in ranges))
    behind = max(0, *(stop - len(weights.values) for _, stop in ranges))
    values = [*[1.0] * before, *weights.values, *[1.0] * behind]
    whole = gs.Constant(f"{name}.weights", np.array(values, dtype).reshape(shape))
    ends = [
        lowering.numbers(f"{name}.{what}", [PlaceNumber(weights.parts.mesh_axis, numbers)], site)
        for what, numbers in (
            ("starts", tuple(start + before for start, _ in ranges)),
            ("stops", tuple(stop + before for _, stop in ranges)),
        )
    ]
    along = constant(f"{name}.axis", [weights.axis], np.int64)
    return lowering.out.emit("Slice", [whole, *ends, along], f"{name}.own", dtype, site)
