"""A search that has solved integer programs is interrupted as any other Python code."""

import os
import signal

import pytest
from ortools.sat.python import cp_model

from partc.cost.new_solver import new_solver


def test_ctrl_c_after_a_solution_is_a_keyboard_interrupt() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        model = cp_model.CpModel()
        model.maximize(model.new_int_var(0, 10, "number"))

        solver = new_solver()

        assert solver.solve(model) == cp_model.OPTIMAL
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
