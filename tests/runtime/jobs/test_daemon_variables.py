"""A rank's variables at the end of training."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from partc.compiler.importing.import_training import import_training_graph
from partc.runtime.data.checkpoint import read_arrays
from tests.builders.plans.compiled_steps import compile_step
from tests.builders.plans.wide_mlp import wide_mlp

# In a process of its own: what imports MPI is a rank of one.
COLLECTING = """
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from mpi4py import MPI

from partc.runtime.jobs.daemon_variables import VariablesOfRank
from partc.runtime.plan.plan_folder import read_plan_folder

plan = read_plan_folder("out").plan
shapes = {variable.name: variable.shape for variable in plan.variables}
values = {p.value: np.full(shapes[p.variable], 3, np.float32) for p in plan.ranks[0].pieces}
variables = VariablesOfRank(plan, plan.ranks[0], SimpleNamespace(array=values.get), MPI.COMM_SELF)
tracemalloc.start()
variables.write(Path("trained.safetensors"))
print(tracemalloc.get_traced_memory()[1])
"""


def test_variables_are_collected_without_being_read_into_memory(tmp_path: Path) -> None:
    step = import_training_graph(wide_mlp(8, (64, 2048, 64)))
    compile_step(step, tmp_path / "out", "1x1")

    ran = subprocess.run(
        [sys.executable, "-c", COLLECTING], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    variables = read_arrays(tmp_path / "trained.safetensors")
    largest = max(variables.values(), key=lambda array: array.nbytes)
    assert (largest.nbytes, np.unique(largest)) == (64 * 2048 * 4, [3])
    assert int(ran.stdout) < largest.nbytes / 2
