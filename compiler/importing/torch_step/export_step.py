"""Export one training step of PyTorch, and refuse it where onnxruntime computes something else."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from partc.compiler.importing.bindings import Bindings, write_bindings
from partc.compiler.model_files.write_model import write_model
from partc.runtime.callers_code import callers_function
from partc.runtime.check_arguments import public
from partc.runtime.errors import BadUsage, UnsupportedModel

if TYPE_CHECKING:
    import torch

    from partc.compiler.importing.torch_step.trace_step import LossFunction, TracedStep

_BY_POSITION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
EXPORTED_OPSET = 20  # the newest whose ops partc's converter leaves as they are


@public
def export_step(
    module: "torch.nn.Module",
    loss: "LossFunction",
    optimizer: "torch.optim.Optimizer",
    example_inputs: "Sequence[torch.Tensor]",
    path: str | Path,
    *,
    sample_axes: Mapping[str, int | None] | None = None,
) -> onnx.ModelProto:
    """Write train.onnx: forward, backward and update of `module`, as `optimizer` would do it.

    `loss(model, *inputs)` calls `model` as the module is called and returns a scalar; its argument
    names become the names of the data inputs (of `*inputs`: inputs_0, ...), and `example_inputs` are their
    values, with the sizes that are exported. `sample_axes` says along which axis an input's samples lie
    (None: along none). Two steps are taken in PyTorch and in onnxruntime. Raises BadUsage, UnsupportedModel.
    """
    _require_torch()
    _check_types(module, loss, optimizer, example_inputs)
    _check_trains(module, optimizer)
    from partc.compiler.importing.torch_step.compare_steps import compare_steps
    from partc.compiler.importing.torch_step.trace_step import trace_step

    names = _input_names(loss, len(example_inputs))
    loss = callers_function(loss)
    traced = trace_step(module, loss, optimizer, example_inputs)
    try:
        model = _export(traced, names)
    except UnsupportedModel as refusal:
        raise _blame(refusal, module, loss, optimizer, example_inputs, names) from refusal
    compare_steps(model, traced, names, module, loss, optimizer)
    state = {name: _next(name) for name in traced.variables}
    bindings = Bindings(state=state, loss="loss", sample_axes=dict(sample_axes or {}))
    write_bindings(model, bindings)
    write_model(model, path)
    return model


def _require_torch() -> None:
    try:
        import onnxscript  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        raise BadUsage(
            f"partc.torch needs {error.name}, which is not installed",
            at="partc.torch.export_step",
            fix="pip install torch==2.13.0 onnxscript",
        ) from error


def _check_types(module: object, loss: object, optimizer: object, example_inputs: object) -> None:
    import torch

    inputs = example_inputs if isinstance(example_inputs, Sequence) else [None]
    for name, is_right, kind in (
        ("module", isinstance(module, torch.nn.Module), "a torch.nn.Module"),
        ("loss", callable(loss), "a function of (model, *inputs)"),
        ("optimizer", isinstance(optimizer, torch.optim.Optimizer), "a torch.optim.Optimizer"),
        ("example_inputs", all(isinstance(one, torch.Tensor) for one in inputs), "a sequence of tensors"),
    ):
        if not is_right:
            raise BadUsage(f"{name} is not {kind}", at=f"export_step({name}=...)", fix=f"give {kind}")


def _check_trains(module: "torch.nn.Module", optimizer: "torch.optim.Optimizer") -> None:
    """Refuse an optimizer that changes nothing of the module. Raises BadUsage."""
    trainable = {id(value) for value in module.parameters() if value.requires_grad}
    if any(id(value) in trainable for group in optimizer.param_groups for value in group["params"]):
        return
    name = type(optimizer).__name__
    fix = f"make it of the module's own: torch.optim.{name}(module.parameters(), ...)"
    if not trainable:
        fix = "give a module with parameters, and let some of them require a gradient"
    raise BadUsage(
        f"{name} changes no parameter of the module: the step would train nothing",
        at="export_step(optimizer=...)",
        fix=fix,
    )


def _input_names(loss: "LossFunction", count: int) -> list[str]:
    """Name the data inputs as the loss's arguments behind the model; of `*inputs` inputs_0."""
    import torch

    function = loss.forward if isinstance(loss, torch.nn.Module) else loss
    taken = [p for p in inspect.signature(function).parameters.values() if p.kind in _BY_POSITION]
    if taken and taken[0].kind is not inspect.Parameter.VAR_POSITIONAL:  # of which the model is the first
        taken = taken[1:]
    while len(taken) > count and taken[-1].default is not inspect.Parameter.empty:
        taken.pop()
    names = [p.name for p in taken if p.kind is not inspect.Parameter.VAR_POSITIONAL]
    for rest in taken[len(names) :]:
        names += [f"{rest.name}_{number}" for number in range(count - len(names))]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadUsage(
            f"two inputs of the loss would be called {twice}",
            at="partc.torch.export_step",
            fix=f"call the loss's argument {twice} otherwise",
        )
    if len(names) != count:
        raise BadUsage(
            f"{count} example inputs for a loss of {len(names)} inputs {names}",
            at="partc.torch.export_step",
            fix="give one example input for each argument of the loss behind the model, as in "
            "def loss(model, x, labels) with [x, labels]",
        )
    return names


def _next(variable: str) -> str:
    return f"{variable}.next"


def _export(traced: "TracedStep", names: Sequence[str]) -> onnx.ModelProto:
    import torch

    from partc.compiler.importing.torch_step.exact_constants import numbers_in_float64

    try:
        with numbers_in_float64() if traced.is_float64 else nullcontext():
            program = torch.onnx.export(
                traced.graph,
                (*traced.inputs, *traced.variables.values()),
                input_names=[*names, *traced.variables],
                output_names=["loss", *map(_next, traced.variables)],
                opset_version=EXPORTED_OPSET,
                dynamo=True,
                optimize=False,  # its rewriting has dropped Adam's epsilon
                external_data=False,
                verify=False,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise UnsupportedModel(
            f"PyTorch's exporter cannot write this step: {_innermost(error)}",
            at="partc.torch.export_step",
            fix="write the module with ops that torch.onnx.export knows",
        ) from error
    if program is None:
        raise UnsupportedModel("PyTorch exported nothing", at="torch.onnx.export", fix="see its own message")
    model: onnx.ModelProto = program.model_proto
    _drop_traces(model)
    for name, value in traced.variables.items():
        array = value.detach().contiguous().numpy()
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def _blame(
    refusal: UnsupportedModel,
    module: "torch.nn.Module",
    loss: "LossFunction",
    optimizer: "torch.optim.Optimizer",
    example_inputs: "Sequence[torch.Tensor]",
    names: Sequence[str],
) -> UnsupportedModel:
    """Return the refusal of a step as the optimizer's fault, where with SGD it can be exported."""
    import torch

    from partc.compiler.importing.torch_step.trace_step import trace_step

    trained = [value for value in module.parameters() if value.requires_grad]
    try:
        _export(trace_step(module, loss, torch.optim.SGD(trained, lr=0.1), example_inputs), names)
    except Exception:  # the loss's own, too: what was refused first is told
        return refusal
    name = type(optimizer).__name__
    return UnsupportedModel(
        refusal.what,
        at=f"partc.torch.export_step, {name}.step",
        fix=f"use another optimizer than {name}, such as AdamW",
    )


def _innermost(error: BaseException) -> str:
    """Return the first line of the error that the others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).partition("\n")[0]


def _drop_traces(model: onnx.ModelProto) -> None:
    """Drop what names the exporting machine: stack traces and file names."""
    for node in model.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for info in [*model.graph.value_info, *model.graph.input, *model.graph.output]:
        del info.metadata_props[:]
    del model.graph.metadata_props[:], model.metadata_props[:]
