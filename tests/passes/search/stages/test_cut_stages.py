"""Where a pipeline's stages begin: as balanced as any cut, over few bytes."""

from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.models.catalogue import build_model
from partc.passes.layouts.place_nodes import place_nodes
from partc.passes.search.stages.cut_stages import cut, cut_stages
from partc.passes.search.stages.price_cuts import BALANCED
from partc.runtime.errors import BadUsage
from partc.runtime.log import log
from tests.passes.layouts.test_place_nodes import analysed


def deep(*sizes: int) -> onnx.ModelProto:
    forward = build_model("mlp", sizes=sizes, batch=16)
    return build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))


def by_flops(flops: int, nbytes: int, packed_bytes: int = 0) -> float:
    return float(flops)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_a_cut_is_nearly_the_best_of_all_and_of_the_fewest_bytes_among_these(stages: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    seconds = [float(second) for second in rng.integers(1, 20, 9)]
    nbytes = [0, *(int(size) for size in rng.integers(1, 100, 9))]

    found = cut(seconds, nbytes, stages)

    cuts = list(combinations(range(1, 9), stages - 1))
    best = min(greatest(seconds, c) for c in cuts)
    near = [c for c in cuts if greatest(seconds, c) <= best * (1 + BALANCED[0]) + 1e-9]
    assert tuple(found) in near
    assert sum(nbytes[end] for end in found) == min(sum(nbytes[end] for end in c) for c in near)


def greatest(seconds: list[float], cut: tuple[int, ...]) -> float:
    bounds = [0, *cut, len(seconds)]
    return max(sum(seconds[start:stop]) for start, stop in pairwise(bounds))


def test_equal_layers_are_shared_out_equally(tmp_path: Path) -> None:
    analysis = analysed(deep(*[256] * 9), tmp_path)

    begin = cut_stages(analysis, 4, by_flops)
    places = place_nodes(analysis, begin, 4)

    assert sorted(begin.values()) == [1, 2, 3]
    layers = [stage for name, stage in places.variables.items() if name.endswith("weight")]
    assert sorted(layers) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_costs_most_is_not_in_one_stage(tmp_path: Path) -> None:
    analysis = analysed(deep(8, 512, 512, 8, 8, 512, 512, 8), tmp_path)

    begin = cut_stages(analysis, 2, by_flops)
    places = place_nodes(analysis, begin, 2)

    assert places.variables["layer1.weight"] == 0
    assert places.variables["layer5.weight"] == 1


def test_more_stages_than_ops_are_refused(tmp_path: Path) -> None:
    analysis = analysed(deep(4, 3), tmp_path)

    with pytest.raises(BadUsage, match=r"40 stages of \d+ ops.*\n.*--strategy pipeline=40"):
        cut_stages(analysis, 40, by_flops)


def test_how_busy_the_stages_are_is_logged_and_left_to_compile_to_warn_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "even").mkdir()
    with caplog.at_level("INFO", log.name):
        cut_stages(analysed(deep(*[256] * 9), tmp_path / "even"), 4, by_flops)
        cut_stages(analysed(deep(1024, 1024, 8, 8, 8), tmp_path), 4, by_flops)

    even, fat = (record for record in caplog.records if "stages:" in record.getMessage())
    assert even.levelname == fat.levelname == "INFO"
    assert "4 stages: the busiest takes" in fat.getMessage()
    even_times, fat_times = (float(r.getMessage().split(" takes ")[1].split()[0]) for r in (even, fat))
    assert even_times < 1.5 < 3 < fat_times
