"""Two steps in PyTorch and in onnxruntime, from the same values, compared.

Random numbers that PyTorch draws are recorded, so that the exported step can be given the same. Dropout asks
for Bernoulli draws, which the exporter writes as uniform ones that are compared: here they are drawn so too.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel
from torch.utils._python_dispatch import TorchDispatchMode

from partc.compiler.importing.draw_random_inputs import draw_random_inputs
from partc.compiler.importing.torch_step.trace_step import LossFunction, TracedStep
from partc.compiler.model_files.open_model import FATAL, open_model
from partc.runtime.callers_code import callers_code
from partc.runtime.errors import UnsupportedModel
from partc.runtime.plan.variables import DrawnInput

aten = torch.ops.aten
_UNIFORM_OR_NORMAL = (aten.rand.default, aten.rand_like.default, aten.randn.default, aten.randn_like.default)


class RecordedDraws(TorchDispatchMode):  # type: ignore[misc]  # untyped where torch is missing
    """While it is active, every draw is kept in `draws`, in order, and in `unknown` what else may draw."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[torch.Tensor] = []
        self.unknown: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,  # an OpOverload, untyped where torch is missing
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # whatever the op returns
        if func is aten.bernoulli_.float:
            return args[0].copy_(self._is_below(args[0], args[1] if len(args) > 1 else 0.5))
        if func is aten.bernoulli.p:
            return self._is_below(args[0], args[1]).to(args[0].dtype)
        if func is aten.native_dropout.default and (args[2] or args[2] is None):
            mask = self._is_below(args[0], 1 - args[1])
            return args[0] * mask / (1 - args[1]), mask
        result = func(*args, **(kwargs or {}))
        if func in _UNIFORM_OR_NORMAL:
            self.draws.append(result.detach().clone())
        elif torch.Tag.nondeterministic_seeded in func.tags:
            self.unknown.append(str(func))
        return result

    def _is_below(self, like: torch.Tensor, chance: float) -> torch.Tensor:
        uniform = torch.rand(like.shape)
        self.draws.append(uniform)
        return uniform < chance


STEPS = 2
# Of the largest value of a variable. Attributes of ops are float32, whatever these compute in.
RTOL = {torch.float64: 1e-6}
DEFAULT_RTOL = 1e-4
NOISE = 1e-6  # gradients below this share of the largest are rounding noise, which Adam makes full steps of


def compare_steps(
    model: onnx.ModelProto,
    traced: TracedStep,
    names: Sequence[str],
    module: torch.nn.Module,
    loss: LossFunction,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Refuse a model whose steps are not PyTorch's. Raises UnsupportedModel.

    Where the step draws random numbers, the model is given those that PyTorch drew.
    """
    model, drawn = draw_random_inputs(model)
    session = _open(model)
    outputs = ["loss", *(f"{name}.next" for name in traced.variables)]
    data = dict(zip(names, (value.numpy() for value in traced.inputs), strict=True))
    values = {name: value.detach().numpy() for name, value in traced.variables.items()}
    module, optimizer = copy.deepcopy((module, optimizer))
    module.train()
    for step in range(1, STEPS + 1):
        expected = _step(module, loss, optimizer, traced)
        draws = _draws_by_input(drawn, expected.recorded)
        value, *renewed = session.run(outputs, {**data, **draws, **values})
        values = dict(zip(traced.variables, renewed, strict=True))
        _compare("loss", value, expected.loss, step)
        for name, reference in expected.values.items():
            noise = expected.noise.get(name)
            _compare(name, values[name], reference, step, noise)
            if noise is not None:  # else the next step would start from different values
                values[name] = np.where(noise, reference.numpy(), values[name])


def _open(model: onnx.ModelProto) -> ort.InferenceSession:
    try:
        return open_model(model, severity=FATAL)
    except NoKernel as error:
        lack = str(error).split(" : ", 3)[-1]
        raise UnsupportedModel(
            f"ONNX Runtime {ort.__version__} cannot run the step: {lack}",
            at="partc.torch.export_step",
            fix="export the module and its inputs in float32: module.float()",
        ) from error


class _Expected:
    """What PyTorch has after a step; `noise` marks elements whose gradient is rounding noise."""

    def __init__(self, loss: torch.Tensor, recorded: RecordedDraws) -> None:
        self.loss = loss.detach()
        self.recorded = recorded
        self.values: dict[str, torch.Tensor] = {}
        self.noise: dict[str, np.ndarray] = {}


def _step(
    module: torch.nn.Module, loss: LossFunction, optimizer: torch.optim.Optimizer, traced: TracedStep
) -> _Expected:
    optimizer.zero_grad()
    with RecordedDraws() as recorded:
        value = loss(module, *traced.inputs)
    value.backward()
    with callers_code():
        optimizer.step()
    expected_step = _Expected(value, recorded)
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    gradients = {name: parameters[name].grad for name in traced.parameters}
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None and g.numel())
    for name, buffer in buffers.items():
        expected_step.values[name] = buffer.detach()
    for name in traced.parameters:
        gradient = gradients[name]
        expected_step.values[name] = parameters[name].detach()
        if gradient is not None:
            size = gradient.abs().numpy()
            expected_step.noise[name] = (size <= NOISE * largest) & ~_untouched_rows(size)
    return expected_step


def _untouched_rows(size: np.ndarray) -> np.ndarray:
    """Mark the rows of a table that a step leaves alone; single elements may be zero because terms cancel."""
    if size.ndim < 2:
        return np.zeros(size.shape, bool)
    return np.broadcast_to((size == 0).all(axis=tuple(range(1, size.ndim)), keepdims=True), size.shape)


def _draws_by_input(drawn: Sequence[DrawnInput], recorded: RecordedDraws) -> dict[str, np.ndarray]:
    """Return what PyTorch drew by the exported step's inputs: both are in the order of the forward pass."""
    draws = recorded.draws
    if [entry.shape for entry in drawn] != [tuple(draw.shape) for draw in draws]:
        found = (
            f"PyTorch draws with {', '.join(dict.fromkeys(recorded.unknown))}, which cannot be followed"
            if recorded.unknown
            else f"PyTorch draws random numbers {len(draws)} times, the exported step {len(drawn)} times, "
            "or in other shapes"
        )
        raise UnsupportedModel(
            found,
            at="partc.torch.export_step, the exported step in onnxruntime",
            fix="draw with nn.Dropout, torch.rand_like or torch.randn_like alone, in the forward pass",
        )
    return {entry.name: draw.numpy().astype(entry.dtype) for entry, draw in zip(drawn, draws, strict=True)}


def _compare(
    name: str, actual: np.ndarray, reference: torch.Tensor, step: int, noise: np.ndarray | None = None
) -> None:
    expected = reference.numpy()
    error = np.abs(np.asarray(actual, np.float64) - expected)
    if noise is not None:
        error = np.where(noise & np.isfinite(error), 0.0, error)
    tolerance = RTOL.get(reference.dtype, DEFAULT_RTOL) * max(float(np.abs(expected).max(initial=0.0)), 1e-3)
    if not np.all(error <= tolerance):
        raise UnsupportedModel(
            f"after step {step}, {name!r} is {np.max(error):.3g} from PyTorch's ({tolerance:.3g} allowed)",
            at="partc.torch.export_step, the exported step in onnxruntime",
            fix="the exporter mistranslates an op: replace modules until the step agrees",
        )
