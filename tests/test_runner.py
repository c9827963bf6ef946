from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from partc.runtime.checkpoint import read_arrays
from partc.runtime.errors import BadData, Diverged
from partc.runtime.in_process import train_in_process
from partc.runtime.job import Progress
from partc.runtime.runner import Runner
from tests.hand_made_plans import (
    linear_all_reduce,
    linear_batches,
    linear_servers,
    rows_there_and_back,
    table_batches,
    table_on_servers,
)

Batches = list[dict[str, np.ndarray]]

PLANS: dict[str, tuple[Callable[[Path], Path], Batches]] = {
    "all-reduce": (partial(linear_all_reduce, replicas=3), linear_batches(3, steps=3)),
    "reduce, merged": (partial(linear_servers, merged=True, scattered=False), linear_batches(2, steps=3)),
    "reduce": (partial(linear_servers, merged=False, scattered=False), linear_batches(2, steps=3)),
    "scatter, merged": (partial(linear_servers, merged=True, scattered=True), linear_batches(2, steps=3)),
    "scatter": (partial(linear_servers, merged=False, scattered=True), linear_batches(2, steps=3)),
    "table, merged": (partial(table_on_servers, merged=True), table_batches(steps=3)),
    "table": (partial(table_on_servers, merged=False), table_batches(steps=3)),
    "rows, merged": (partial(rows_there_and_back, merged=True), table_batches(steps=2)),
    "rows": (partial(rows_there_and_back, merged=False), table_batches(steps=2)),
}


@pytest.mark.parametrize("name", PLANS)
def test_daemons_compute_what_one_process_computes(tmp_path: Path, name: str) -> None:
    make, batches = PLANS[name]
    folder = make(tmp_path / "out")

    actual = Runner(folder).train(batches, len(batches), outputs="all")

    expected = train_in_process(folder, batches)
    for variable, value in expected.variables.items():
        np.testing.assert_allclose(actual.variables[variable], value, rtol=1e-12)
    for output, reference in zip(actual.outputs, expected.outputs, strict=True):
        assert output.keys() == reference.keys()
        for key, value in reference.items():
            np.testing.assert_allclose(output[key], value, rtol=1e-12)
    assert actual.disagreeing == ()
    assert actual.payload_bytes == expected.payload_bytes
