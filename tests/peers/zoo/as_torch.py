"""Steps of PyTorch's autograd and optimizer, from the values and on the data that ours have."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime
import torch
from torch.nn import functional

from partc.passes.graph.training_graph import StoredTensor, TrainingGraph
from partc.runtime.plan.variables import Constant
from tests.peers.zoo.export import perturb
from tests.peers.zoo.exported import Exported
from tests.peers.zoo.model import Model

CHANGE_RTOL = 5e-3  # of a parameter's largest change
GRADIENT_RTOL = 4e-6  # of the largest gradient of all: what is below is rounding
EPSILON = {"rmsprop": 1e-2, "adam": 1e-3, "adamw": 1e-3}  # where an optimizer divides gradients by their size
ROUNDING = 3e-7  # of a value, stored in float32
NUDGES = 4  # with other last bits in the first values, where PyTorch and ours are farther apart than that
NUDGED = 4.0  # what the worst of them makes is allowed this often

Values = dict[str, np.ndarray]
Batches = Sequence[Values]


class Differs(Exception):
    """Two things that had to be equal are not."""


@dataclass(frozen=True)
class BesideTorch:
    """Trains the module's own parameters that the graph's initializers `names` hold."""

    model: Model
    exported: Exported
    names: list[str]
    optimizer: str
    lr: float

    def module(self) -> torch.nn.Module:
        """Build the module: with moved parameters, but for an optimised export, which has merged equal ones.

        Where biases are zero, activations are exactly at the knots of ReLU6, whose gradient PyTorch
        has as zero there, and that of the clamp, which the exporter writes in its place, as one.
        """
        module = self.model.module()
        names = {self.exported.members[name][0][0] for name in self.names}
        if self.exported.variant != "optimised":
            perturb(module, names if self.exported.variant == "raw" else None)
        return module

    def initial(self) -> Values:
        """Return the values that training begins with, by the names of the graph."""
        parameters = dict(self.module().named_parameters())
        values = {}
        for name in self.names:
            (member,), is_transposed = self.exported.members[name]
            value = parameters[member].detach().numpy()
            values[name] = np.array(value.T if is_transposed else value, order="C")
        return values

    def hold(self, what: str, found: Values, batches: Batches) -> None:
        """Raise Differs unless PyTorch ends with the same values after a step on each total batch.

        Where they differ, PyTorch takes the same steps from values with other last bits: a step may carry an
        activation over the knot of a ReLU, or another one over the rest in a MaxPool.
        """
        differing = self._differing(found, batches, {})
        if differing:
            differing = self._differing(found, batches, self._sensitivity(batches))
        if differing:
            count = f"{len(differing)} of {len(self.names)}"
            raise Differs(
                f"PyTorch's steps and those of {what} differ in {count} parameters: {differing[:3]}"
            )

    def _sensitivity(self, batches: Batches) -> dict[str, float]:
        """Return how far each parameter ends from where it would, by its largest element."""
        ends = []
        for seed in range(1 + NUDGES):
            module = self.module()
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for value in module.parameters() if seed else ():
                    value *= 1 + ROUNDING * (2 * torch.rand(value.shape, generator=generator) - 1)
            self._train(module, batches)
            ends.append({name: value.detach() for name, value in module.named_parameters()})
        first, *others = ends
        return {
            name: max(float((other[name] - value).abs().max()) for other in others) if value.numel() else 0.0
            for name, value in first.items()
        }

    def _differing(self, found: Values, batches: Batches, sensitivity: dict[str, float]) -> list[str]:
        module = self.module()
        start = {name: value.detach().numpy().copy() for name, value in module.named_parameters()}
        largest = self._train(module, batches)
        after = {name: value.detach().numpy() for name, value in module.named_parameters()}
        differing = []
        for name in self.names:
            (member,), is_transposed = self.exported.members[name]
            ours = found[name].T if is_transposed else found[name]
            change = float(np.abs(after[member] - start[member]).max(initial=0))
            allowed = CHANGE_RTOL * change + ROUNDING * np.abs(after[member]) + 1e-12
            allowed = allowed + NUDGED * sensitivity.get(member, 0.0)
            allowed = allowed + self.lr * GRADIENT_RTOL * largest / EPSILON.get(self.optimizer, 1.0)
            error = np.abs(ours - after[member])
            if not (error <= allowed).all():
                differing.append(f"{name} by {np.nanmax(error):.2g} of {change:.2g}")
        return differing

    def _train(self, module: torch.nn.Module, batches: Batches) -> float:
        """Take the steps; return the largest gradient of any parameter."""
        parameters = dict(module.named_parameters())
        trained = [parameters[self.exported.members[name][0][0]] for name in self.names]
        optimizer = _optimizer(self.optimizer, self.lr, trained)
        largest = 0.0
        for batch in batches:
            module.zero_grad()
            self._loss(module, batch).backward()
            gradients = [value.grad for value in trained if value.grad is not None]
            largest = max([largest, *(float(gradient.abs().max()) for gradient in gradients)])
            optimizer.step()
        return largest

    def _loss(self, module: torch.nn.Module, batch: Values) -> torch.Tensor:
        result = module(*(torch.from_numpy(batch[name]) for name in self.model.inputs))
        if self.model.output != "logits":
            return result
        (added,) = (value for name, value in batch.items() if name not in self.model.inputs)
        target = torch.from_numpy(added)
        if self.model.loss == "mse":
            return functional.mse_loss(result, target)
        return functional.cross_entropy(result.flatten(0, -2), target.flatten())


def after_steps_in_onnxruntime(training: TrainingGraph, first: Values, batches: Batches) -> Values:
    """Return the variables after steps of the training graph itself, in stock ONNX Runtime."""
    values = {}
    for name, variable in training.variables.items():
        initial = variable.initial
        assert isinstance(initial, StoredTensor | Constant)
        is_stored = isinstance(initial, StoredTensor)
        values[name] = initial.load() if is_stored else np.full(variable.shape, initial.value, variable.dtype)
    values |= first
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1  # ScatterND adds rows of equal ids one after another only then
    session = onnxruntime.InferenceSession(training.source, options, providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    read = {entry.name for entry in session.get_inputs()}
    for batch in batches:
        fed = {name: value for name, value in {**values, **batch}.items() if name in read}
        results = dict(zip(outputs, session.run(None, fed), strict=True))
        values = {name: results[variable.next] for name, variable in training.variables.items()}
    return values


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
