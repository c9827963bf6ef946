"""One training step of a module as a function of tensors, and its trace.

    (x, .., W, buffers, slots) -> (loss, W_next, buffers_next, slots_next)

The optimizer's own `step` runs inside the trace, on clones, so whatever torch.optim offers is traced
as PyTorch computes it.
"""

import copy
import traceback
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call, functionalize, grad_and_value
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from partc.compiler.importing.torch_step.decompositions import WRITTEN_OUT
from partc.runtime.callers_code import callers_code
from partc.runtime.errors import UnsupportedModel

LossFunction = Callable[..., torch.Tensor]
Slots = dict[str, dict[str, torch.Tensor]]  # by parameter, then by the optimizer's name for it

# The exporter writes training BatchNorm as inference; LayerNorm keeps float32 statistics of float64,
# others have float32 settings, or no kernel of float64 in onnxruntime.
_WRITTEN_OUT = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten.native_batch_norm_backward.default,
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
    torch.ops.aten._native_batch_norm_legit_functional.default,
)
_VIEWS = {
    torch.ops.aten.select_copy.int: torch.ops.aten.select.int,
    torch.ops.aten.slice_copy.Tensor: torch.ops.aten.slice.Tensor,
}
_WRITTEN_OUT_IN_FLOAT64 = (
    torch.ops.aten.elu.default,
    torch.ops.aten.hardtanh.default,
    torch.ops.aten.leaky_relu.default,
    torch.ops.aten.native_layer_norm.default,
)


@dataclass(frozen=True)
class TracedStep:
    """A step, what it was traced on, and the variables in the order of its arguments and results."""

    graph: torch.fx.GraphModule
    inputs: tuple[torch.Tensor, ...]
    variables: dict[str, torch.Tensor]
    parameters: tuple[str, ...]

    @property
    def is_float64(self) -> bool:
        """Tell whether parameters are of that type."""
        return any(self.variables[name].dtype == torch.float64 for name in self.parameters)


def trace_step(
    module: torch.nn.Module,
    loss: LossFunction,
    optimizer: torch.optim.Optimizer,
    inputs: Sequence[torch.Tensor],
) -> TracedStep:
    """Trace one step in training mode; the module and the optimizer stay as they are."""
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    buffers = {name: value.detach().clone() for name, value in module.named_buffers()}
    slots = _first_slots(module, optimizer, trained)
    _check_first_step(module, optimizer, trained, slots)
    start = {name: value.detach().clone() for name, value in trained.items()}
    variables = (
        start | buffers | {_slot(p, k): v for p, slot_values in slots.items() for k, v in slot_values.items()}
    )
    step = _step_function(module, loss, optimizer, slots, tuple(variables), len(inputs))
    table = _decompositions(trained)
    was_training = module.training
    module.train()
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the others' gradients are single ops
            whole = functionalize(step, remove="mutations_and_views")
            graph = make_fx(whole, decomposition_table=table)(*inputs, *variables.values())
    except RuntimeError as error:
        if (refusal := _refusal(error, optimizer)) is None:
            raise
        raise refusal from error
    finally:
        module.train(was_training)
    _write_views(graph)
    return TracedStep(graph, tuple(inputs), variables, tuple(start))


def _refusal(error: RuntimeError, optimizer: torch.optim.Optimizer) -> UnsupportedModel | None:
    """Return what PyTorch means where it cannot trace a step; None: another fault."""
    message = str(error)
    if "tracing tensor" in message:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        is_of_optimizer = any(frame.f_code is _run_update.__code__ for frame in frames)
        return UnsupportedModel(
            "the step reads the value of a tensor as a number, which a graph cannot",
            at=f"partc.torch.export_step, {_step_of(optimizer) if is_of_optimizer else 'the loss'}",
            fix="use an optimizer that counts in tensors, such as AdamW"
            if is_of_optimizer
            else "use tensor ops in place of .item(), float() and conditions on values",
        )
    if "functorch transform" in message or "does not require grad" in message:
        return UnsupportedModel(
            "the loss takes a gradient with torch.autograd, which cannot be traced",
            at="partc.torch.export_step, the loss",
            fix="take it with torch.func: torch.func.grad(lambda x: model(x).sum())(x)",
        )
    return None


def _step_function(
    module: torch.nn.Module,
    loss: LossFunction,
    optimizer: torch.optim.Optimizer,
    slots: Slots,
    variables: Sequence[str],
    inputs: int,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return the step as a function of its inputs and variables, in the order of `variables`."""
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    frozen = {name: value.detach() for name, value in module.named_parameters() if not value.requires_grad}
    buffers = [name for name, _ in module.named_buffers()]

    def step(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = dict(zip(variables, arguments[inputs:], strict=True))
        parameters = {name: values[name] for name in trained}

        def loss_of(
            parameters: Mapping[str, torch.Tensor],
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            renewed = {name: values[name].clone() for name in buffers}

            def model(*args: object, **options: object) -> Any:  # whatever the module returns
                return functional_call(module, {**frozen, **parameters, **renewed}, args, options)

            return loss(model, *arguments[:inputs]), renewed

        gradients, (value, renewed) = grad_and_value(loss_of, has_aux=True)(parameters)
        slot_values = {name: {key: values[_slot(name, key)] for key in slots[name]} for name in trained}
        after, slot_values = _run_update(optimizer, trained, parameters, gradients, slot_values)
        following = after | renewed | {_slot(p, k): v for p, s in slot_values.items() for k, v in s.items()}
        return (value, *(following[name] for name in variables))

    return step


def _decompositions(trained: Mapping[str, torch.Tensor]) -> dict[Any, Callable[..., Any]]:
    is_float64 = any(value.dtype == torch.float64 for value in trained.values())
    written_out = (*_WRITTEN_OUT, *_WRITTEN_OUT_IN_FLOAT64) if is_float64 else _WRITTEN_OUT
    table: dict[Any, Callable[..., Any]] = dict(torch.export.default_decompositions())
    table.update(torch._decomp.get_decompositions(written_out))
    return table | WRITTEN_OUT


def _write_views(graph: torch.fx.GraphModule) -> None:
    """Replace copies of views that the exporter does not know by the views: nothing is written in place."""
    for node in graph.graph.nodes:
        node.target = _VIEWS.get(node.target, node.target)
    graph.recompile()


def _slot(parameter: str, key: str) -> str:
    return f"{parameter}.{key}"


# ---------------------------------------------------------------- the optimizer


class _FirstValues(UserDict[str, Any]):  # an optimizer keeps what it likes
    """What an optimizer keeps of one parameter, and what each tensor was when it was put there."""

    def __init__(self, kept: Mapping[str, Any]) -> None:
        self.first: dict[str, torch.Tensor] = {}
        super().__init__(kept)

    def __setitem__(self, key: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            self.first.setdefault(key, value.detach().clone())
        super().__setitem__(key, value)


def _first_slots(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, trained: Mapping[str, torch.Tensor]
) -> Slots:
    """Return what the optimizer keeps of each parameter before its first step.

    Most optimizers make it in their first step: a copy takes one, all parameters and gradients zero, so that
    what is made of these is zero, too.
    """
    trial, trial_optimizer = copy.deepcopy((module, optimizer))
    values = dict(trial.named_parameters())
    kept = {name: _FirstValues(trial_optimizer.state[values[name]]) for name in trained}
    for name in trained:
        trial_optimizer.state[values[name]] = kept[name]
        values[name].data.zero_()
        values[name].grad = torch.zeros_like(values[name])
    _take_first_step(trial_optimizer)
    return {
        name: {key: _counted_in(trained[name].dtype, value) for key, value in kept[name].first.items()}
        for name in trained
    }


def _take_first_step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step. Raises UnsupportedModel where an optimizer of PyTorch's takes none."""
    try:
        with callers_code():
            optimizer.step()
    except Exception as error:
        if not type(optimizer).__module__.startswith("torch.optim"):
            raise
        raise UnsupportedModel(
            f"{type(optimizer).__name__} takes no step of dense gradients on the CPU: {error}",
            at=f"partc.torch.export_step, {_step_of(optimizer)}",
            fix="use one whose step() needs no closure, takes dense gradients and is not capturable, "
            "such as AdamW",
        ) from error


def _step_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__name__}.step"


def _counted_in(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    """Return a count of steps in a parameter's float64, in which PyTorch's numbers are computed."""
    return value.to(dtype) if dtype == torch.float64 and value.dim() == 0 else value


def _check_first_step(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    trained: Mapping[str, torch.Tensor],
    slots: Slots,
) -> None:
    """Refuse an optimizer whose first step is not as later ones with `slots`. Raises UnsupportedModel."""
    trial, trial_optimizer = copy.deepcopy((module, optimizer))
    values = dict(trial.named_parameters())
    start = {name: value.detach().clone() for name, value in trained.items()}
    gradients = {name: torch.ones_like(value) for name, value in start.items()}
    for name in trained:
        values[name].grad = gradients[name].clone()
    with callers_code():
        trial_optimizer.step()
    after, _ = _run_update(optimizer, trained, start, gradients, slots)
    for name, value in start.items():
        expected = values[name].detach()
        rounding = 4 * torch.finfo(value.dtype).eps * value.abs()
        if ((after[name] - expected).abs() > 0.01 * (expected - value).abs() + rounding).any():
            raise UnsupportedModel(
                f"the first step of {type(optimizer).__name__} is not as its later ones",
                at=f"partc.torch.export_step, the optimizer's step of {name!r}",
                fix="take one step in PyTorch before you export, or choose settings without a first step "
                "of its own (of SGD: no dampening)",
            )


def _run_update(
    optimizer: torch.optim.Optimizer,
    trained: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    slots: Slots,
) -> tuple[dict[str, torch.Tensor], Slots]:
    """Let the optimizer take its step on clones; return the parameters and what it keeps of them."""
    names = {id(value): name for name, value in trained.items()}
    after = {name: value.clone() for name, value in parameters.items()}
    new_slots = {name: {key: value.clone() for key, value in slots[name].items()} for name in after}
    stand_in = copy.copy(optimizer)
    stand_in.param_groups = [
        {**group, "params": [after[names[id(value)]] for value in group["params"] if id(value) in names]}
        | {option: False for option in ("foreach", "fused", "capturable") if option in group}
        | ({"differentiable": True} if "differentiable" in group else {})
        for group in optimizer.param_groups
    ]
    state = type(optimizer.state)(dict)
    for name, value in after.items():
        value.grad = gradients[name]
        state[value] = new_slots[name]
    stand_in.state = state
    if isinstance(optimizer, torch.optim.Adagrad):
        _adagrad_step(stand_in)
    else:
        with _steps_as_tensors():
            type(optimizer).step.__wrapped__(stand_in)  # without its hooks
    return after, {name: {key: state[value][key] for key in new_slots[name]} for name, value in after.items()}


def _adagrad_step(optimizer: torch.optim.Optimizer) -> None:
    """Step as torch.optim.Adagrad does; its own step reads the step count as a number."""
    for group in optimizer.param_groups:
        for value in group["params"]:
            state, gradient = optimizer.state[value], value.grad
            gradient = gradient + group["weight_decay"] * value if group["weight_decay"] else gradient
            state["step"] = state["step"] + 1
            rate = group["lr"] / (1 + (state["step"] - 1) * group["lr_decay"])
            state["sum"] = state["sum"] + gradient * gradient
            value.sub_(rate * gradient / (state["sum"].sqrt() + group["eps"]))


@contextmanager
def _steps_as_tensors() -> Iterator[None]:
    """Keep torch.optim from reading its step counts as numbers, which a trace would freeze."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
