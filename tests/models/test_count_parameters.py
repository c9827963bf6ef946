"""The Parallax paper's table 1 counts millions, without decimals: its rounding is the tolerance."""

import pytest

from partc.models.catalogue import MODELS, build_model
from partc.models.count_parameters import ParameterCount, count_parameters

TABLE_1 = {name: model.published for name, model in MODELS.items() if model.published}


@pytest.mark.parametrize("name", TABLE_1)
def test_a_model_has_as_many_parameters_as_the_paper_says(name: str) -> None:
    dense, sparse = (int(count) for count in TABLE_1[name].split(" + "))

    counted = count_parameters(build_model(name))

    assert round(counted.dense / 1e6) == dense
    # The LM's tables are said to have "800K" words; 814 million would be 793,471 of them.
    assert counted.sparse / 1e6 == pytest.approx(sparse, abs=0.5, rel=0.008)


def test_what_a_gather_reads_is_sparse_and_the_rest_dense() -> None:
    counted = count_parameters(build_model("lm", vocab=10, embedding=4, cells=3, projection=4))

    assert counted == ParameterCount(dense=4 * 12 + 12 + 4 * 12 + 3 * 4, sparse=2 * 10 * 4 + 10)
