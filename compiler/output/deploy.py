"""Put trained variables back into a forward model that any ONNX runtime can serve."""

from collections.abc import Iterable
from pathlib import Path

from partc.compiler.importing.bindings import read_bindings
from partc.compiler.model_files.cut_model import cut_model
from partc.compiler.model_files.model_file import read_model
from partc.compiler.model_files.write_model import write_model
from partc.compiler.output.inference_mode import leave_training
from partc.runtime.data.checkpoint import TensorFile, map_arrays, whole_tensors
from partc.runtime.jobs.results import TRAINED_FILE
from partc.runtime.plan.plan_folder import PlanFolder, check_file

DEPLOYED = "trained.onnx"


def write_trained_model(folder: PlanFolder) -> Path:
    """Write trained.onnx, from what a training left in the plan's folder."""
    path = folder.path / DEPLOYED
    write_forward_model(folder, whole_tensors(map_arrays(folder.path / TRAINED_FILE)), path)
    return path


def write_forward_model(folder: PlanFolder, variables: Iterable[TensorFile], path: Path) -> None:
    """Write a forward model: its outputs, computed from data with those of the variables that they need.

    Nothing is dropped any more, and batches are normalised by running statistics. The outputs are those
    recorded by `partc grad`; of a foreign graph, those that are no next value.
    Raises BadPlan where the plan's model was changed.
    """
    check_file(folder, folder.plan.model)
    model = read_model(folder.path / folder.plan.model)
    bindings = read_bindings(model, None)
    following = set(bindings.state.values())
    results = [output.name for output in model.graph.output if output.name not in following]
    outputs = list(bindings.forward_outputs) or [name for name in results if name != bindings.loss] or results
    leave_training(model, bindings.state)
    forward = cut_model(model, {}, outputs)
    by_name = {variable.name: variable for variable in variables}
    weights = [by_name[value.name] for value in forward.graph.input if value.name in by_name]
    inputs = [value for value in forward.graph.input if value.name not in by_name]
    del forward.graph.input[:]
    forward.graph.input.extend(inputs)
    del forward.metadata_props[:], forward.training_info[:]
    write_model(forward, path, weights)
