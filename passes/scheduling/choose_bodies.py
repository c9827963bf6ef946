"""Choose how convolutions are computed on a CPU, by what was measured."""

from collections.abc import Set as AbstractSet

import onnx

from partc.passes.scheduling.gather_samples import gather_samples
from partc.passes.scheduling.winograd import tile_convolutions


def choose_bodies(
    model: onnx.ModelProto, typed: onnx.ModelProto, only: AbstractSet[str] | None = None
) -> list[str]:
    """Give convolutions of a graph the bodies that are fastest; `typed` is the same with shapes inferred.

    Results differ in rounding alone; so one device, which N ranks are compared with, chooses alike.
    `only`: names of nodes that may be changed. Returns the results that are computed otherwise now.
    """
    return [*gather_samples(model, typed, only), *tile_convolutions(model, typed, only)]
