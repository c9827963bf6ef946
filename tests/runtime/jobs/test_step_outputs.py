from pathlib import Path

import numpy as np

from partc.runtime.jobs.step_outputs import OutputLog, read_outputs


def test_steps_come_back_as_they_were_and_a_cut_one_is_left_out(tmp_path: Path) -> None:
    steps = [
        {
            "loss": np.array(step, np.float32),
            "found": np.arange(2 * step).reshape(2, step),
            "none": np.zeros((0, 3)),
        }
        for step in range(1, 5)
    ]
    with OutputLog(tmp_path / "outputs") as log:
        for outputs in steps:
            log.append(outputs)

    def check(count: int) -> None:
        read = list(read_outputs(tmp_path / "outputs"))
        assert len(read) == count
        for found, outputs in zip(read, steps, strict=False):
            for name, value in outputs.items():
                assert found[name].dtype == value.dtype
                np.testing.assert_array_equal(found[name], value)

    check(4)
    whole = (tmp_path / "outputs").read_bytes()
    for cut in (1, 20, 60):
        (tmp_path / "outputs").write_bytes(whole[:-cut])
        check(3)
