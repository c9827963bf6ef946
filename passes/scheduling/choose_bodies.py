"""Choose how convolutions are computed on a CPU, by what was measured."""

from collections.abc import Set as AbstractSet

import onnx

from partc.passes.scheduling.gather_samples import gather_samples
from partc.passes.scheduling.known_shapes import images_of
from partc.passes.scheduling.winograd import tile_convolutions


def choose_bodies(
    model: onnx.ModelProto,
    typed: onnx.ModelProto,
    only: AbstractSet[str] | None = None,
    replicas: int = 1,
) -> list[str]:
    """Give convolutions of a graph the bodies that are fastest; `typed` is the same with shapes inferred.

    Results differ in rounding alone; so one device, which N ranks are compared with, chooses alike.
    `only`: names of nodes that may be changed. `replicas`: ranks that share the graph's batch, and choose for
    their own share. Returns the results that are computed otherwise now.
    """
    images = images_of(typed.graph, only, replicas)
    return [*gather_samples(model, images), *tile_convolutions(model, images)]
