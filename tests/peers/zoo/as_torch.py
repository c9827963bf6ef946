"""Two steps of a training graph in stock ONNX Runtime, and the same in PyTorch, from the same values."""

import numpy as np
import onnx
import onnxruntime
import torch
from torch.nn import functional

from partc.compiler.importing.import_training import import_training_graph
from partc.passes.training_graph import StoredTensor
from partc.runtime.program import Constant
from tests.peers.zoo.export import perturb
from tests.peers.zoo.exported import Exported
from tests.peers.zoo.model import Model

CHANGE_RTOL = 2e-3  # of a parameter's largest change
GRADIENT_RTOL = 4e-6  # of the largest gradient of all: what is below is rounding
EPSILON = {"rmsprop": 1e-2, "adam": 1e-3, "adamw": 1e-3}  # where an optimizer divides gradients by their size
ROUNDING = 3e-7  # of a value, stored in float32


def compare_with_torch(
    model: Model,
    exported: Exported,
    train: onnx.ModelProto,
    optimizer: str,
    lr: float,
    batches: list[dict[str, torch.Tensor]],
) -> tuple[list[str], int, int]:
    """Return the parameters that differ, how many were compared, and how many the module trains."""
    training = import_training_graph(train)
    names = [name for name in exported.comparable if name in training.gradients]
    data = [_with_labels(training, batch, step) for step, batch in enumerate(batches)]
    after = _steps_in_onnxruntime(training, data)
    module = model.module()
    if exported.variant == "perturbed":
        perturb(module)
    start = {name: value.detach().numpy().copy() for name, value in module.named_parameters()}
    largest = _steps_in_torch(model, module, exported, names, (optimizer, lr), data)
    values = {name: value.detach().numpy() for name, value in module.named_parameters()}
    differing = []
    for name in names:
        members, is_transposed = exported.members[name]
        found = after[name].T if is_transposed else after[name]
        expected, before = values[members[0]], start[members[0]]
        change = np.abs(expected - before)
        allowed = CHANGE_RTOL * change.max(initial=0) + ROUNDING * np.abs(expected) + 1e-12
        allowed = allowed + lr * GRADIENT_RTOL * largest / EPSILON.get(optimizer, 1.0)
        error = np.abs(found - expected)
        if not (error <= allowed).all():
            differing.append(f"{name} by {np.nanmax(error):.2g} of {change.max():.2g}")
    return differing, len(names), exported.trained_parameters


def _with_labels(training: object, batch: dict[str, torch.Tensor], step: int) -> dict[str, np.ndarray]:
    data = {name: value.numpy() for name, value in batch.items()}
    rng = np.random.default_rng(step)
    for entry in training.data_inputs.values():  # type: ignore[attr-defined]
        if entry.name not in data:
            is_label = np.dtype(entry.dtype).kind in "iu"
            drawn = (
                rng.integers(0, entry.high or 3, entry.shape) if is_label else rng.normal(size=entry.shape)
            )
            data[entry.name] = np.asarray(drawn).astype(entry.dtype)
    return data


def _steps_in_onnxruntime(training: object, data: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    values = {}
    for name, variable in training.variables.items():  # type: ignore[attr-defined]
        initial = variable.initial
        assert isinstance(initial, StoredTensor | Constant)
        stored = isinstance(initial, StoredTensor)
        values[name] = initial.load() if stored else np.full(variable.shape, initial.value, variable.dtype)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1  # ScatterND adds rows of equal ids one after another only then
    session = onnxruntime.InferenceSession(training.source, options, providers=["CPUExecutionProvider"])  # type: ignore[attr-defined]
    outputs = [output.name for output in session.get_outputs()]
    read = {entry.name for entry in session.get_inputs()}
    for batch in data:
        fed = {name: value for name, value in {**values, **batch}.items() if name in read}
        results = dict(zip(outputs, session.run(None, fed), strict=True))
        values = {name: results[variable.next] for name, variable in training.variables.items()}  # type: ignore[attr-defined]
    return values


def _steps_in_torch(
    model: Model,
    module: torch.nn.Module,
    exported: Exported,
    names: list[str],
    update: tuple[str, float],
    data: list[dict[str, np.ndarray]],
) -> float:
    """Take the steps; return the largest gradient of any parameter."""
    parameters = dict(module.named_parameters())
    trained = [parameters[exported.members[name][0][0]] for name in names]
    optimizer = _optimizer(*update, trained)
    largest = 0.0
    for batch in data:
        module.zero_grad()
        _loss(model, module, batch).backward()
        gradients = [value.grad for value in trained if value.grad is not None]
        largest = max([largest, *(float(gradient.abs().max()) for gradient in gradients)])
        optimizer.step()
    return largest


def _loss(model: Model, module: torch.nn.Module, batch: dict[str, np.ndarray]) -> torch.Tensor:
    result = module(*(torch.from_numpy(batch[name]) for name in model.inputs))
    if model.output != "logits":
        return result
    (added,) = (value for name, value in batch.items() if name not in model.inputs)
    target = torch.from_numpy(added)
    if model.loss == "mse":
        return functional.mse_loss(result, target)
    return functional.cross_entropy(result.flatten(0, -2), target.flatten())


def _optimizer(name: str, lr: float, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    made = {
        "sgd": lambda: torch.optim.SGD(parameters, lr),
        "momentum": lambda: torch.optim.SGD(parameters, lr, momentum=0.9),
        "nesterov": lambda: torch.optim.SGD(parameters, lr, momentum=0.8, nesterov=True),
        "adagrad": lambda: torch.optim.Adagrad(parameters, lr, initial_accumulator_value=0.1),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr, eps=EPSILON[name]),
        "adam": lambda: torch.optim.Adam(parameters, lr, eps=EPSILON[name]),
        "adamw": lambda: torch.optim.AdamW(parameters, lr, eps=EPSILON[name]),
    }
    return made[name]()
