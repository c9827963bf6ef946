"""Exponential moving averages of the parameters.

    average' = decay average + (1 - decay) W'          the first update copies W'

Source: torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay). Every row of a table decays in
every step, so an average writes whole tables even where the update is sparse.
"""

from collections.abc import Iterable

import numpy as np
from onnx import TensorProto

from partc.compiler.training.updates.update_builder import Updates


def average_parameters(updates: Updates, parameters: Iterable[str], decay: float) -> None:
    """Give every parameter a variable `<parameter>.average`. Needs the parameters' next values."""
    build = updates.build
    build.scope = "average/"
    one = build.constant(np.array(1, np.int64))
    is_later = build.op("Cast", build.op("Min", updates.steps_done(), one), to=TensorProto.DOUBLE)
    kept = build.op("Mul", is_later, build.constant(np.array(decay, np.float64)))
    new = build.op("Sub", build.constant(np.array(1.0, np.float64)), kept)
    for parameter in parameters:
        build.scope = f"{parameter}/average/"
        average = updates.slot(parameter, "average", 0.0)
        old = build.op("Mul", updates.cast(kept, parameter), average)
        moved = build.op("Mul", updates.cast(new, parameter), updates.next_values[parameter])
        updates.finish(average, "Add", old, moved)
    build.scope = ""
