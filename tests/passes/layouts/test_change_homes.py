"""Layouts of a step whose weights are kept otherwise: as if it were laid out anew."""

from pathlib import Path

import numpy as np
import pytest

from partc.passes.layouts.layouts import Split
from partc.passes.layouts.meshes import Mesh
from partc.passes.search.named.weight_layouts import WeightLayouts, sent_along
from tests.builders.graphs.random_steps import random_step
from tests.passes.layouts.test_place_nodes import analysed

MESH = Mesh("worker", (("data", 2), ("tensor", 2)))


@pytest.mark.parametrize("seed", range(8))
def test_what_changes_reach_is_laid_out_as_anew(seed: int, tmp_path: Path) -> None:
    analysis = analysed(random_step(seed), tmp_path)
    layouts, rng = WeightLayouts(analysis, MESH, 1), np.random.default_rng(seed)
    weights = {name: analysis.training.variables[name].shape for name in analysis.training.gradients}
    places = [(name, axis) for name, shape in weights.items() for axis, n in enumerate(shape) if n % 2 == 0]
    assert places

    for _ in range(12):
        drawn = [place for place in places if rng.random() < 0.5]
        splits = {name: Split(axis) for name, axis in drawn}
        changed, anew = layouts.of(splits), WeightLayouts(analysis, MESH, 1).of(splits)

        assert changed.layouts == anew.layouts
        assert changed.decisions == anew.decisions
        assert list(changed.layouts) == list(anew.layouts)  # sums are numbered in this order
        assert sent_along(changed, analysis.order, 1) == sent_along(anew, analysis.order, 1)
