"""Export the zoo's models, optimised and not, with what is known of their parameters.

python -m tests.peers.zoo.export FOLDER [NAME ...]     writes what is missing there

NAME.optimised.onnx   as torch.onnx.export writes it by default
NAME.raw.onnx         optimize=False
NAME.perturbed.onnx   optimised, after every parameter moved a little, so that no two are equal
NAME.json             inputs, parameters by name, shape and hash, buffers, tied parameters
NAME.inputs.npz       one batch of data
"""

import hashlib
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxscript
import torch
from torch import nn

from tests.peers.zoo.model import Model

VARIANTS = ("optimised", "raw", "perturbed")


def export(model: Model, folder: Path) -> None:
    """Write a model's files; the facts last, so that they stand for the whole."""
    module = model.module()
    data = model.draw(0)
    facts = describe(model, module, data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module,
            tuple(data.values()),
            input_names=list(data),
            output_names=[model.output],
            dynamo=True,
            optimize=False,
            verbose=False,
        )
        program.save(_fresh(folder, f"{model.name}.raw.onnx"))
        _keep(folder, f"{model.name}.raw.onnx")
        program.optimize()
        program.save(_fresh(folder, f"{model.name}.optimised.onnx"))
        _keep(folder, f"{model.name}.optimised.onnx")
        _write_perturbed(model, module, facts, folder)
    arrays = {name: value.numpy() for name, value in data.items()}
    with open(_fresh(folder, f"{model.name}.inputs.npz"), "wb") as file:
        np.savez(file, **arrays)
    _keep(folder, f"{model.name}.inputs.npz")
    _fresh(folder, f"{model.name}.json").write_text(json.dumps(facts, indent=1))
    _keep(folder, f"{model.name}.json")


def _write_perturbed(model: Model, module: nn.Module, facts: dict[str, Any], folder: Path) -> None:
    raw = ir.load(folder / f"{model.name}.raw.onnx")
    perturb(module)
    hashes = {}
    for name, value in module.named_parameters():
        hashes[name] = digest(value)
        for other in _names_of(name, facts["tied"]):
            if other in raw.graph.initializers:
                raw.graph.initializers[other].const_value = ir.tensor(value.detach().numpy(), name=other)
    for parameter in facts["parameters"]:
        parameter["perturbed_sha256"] = hashes[parameter["name"]]
    onnxscript.optimizer.optimize(raw)
    ir.save(raw, _fresh(folder, f"{model.name}.perturbed.onnx"))
    _keep(folder, f"{model.name}.perturbed.onnx")


def perturb(module: nn.Module, names: Collection[str] | None = None) -> None:
    """Move parameters (by default all) a little, always in the same way, so that no two are equal."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in module.named_parameters():
            change = 0.01 * torch.randn(value.shape, generator=generator)
            if names is None or name in names:
                value += change


def describe(model: Model, module: nn.Module, data: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return what is known of a module: which of its tensors are trained, which are constants."""
    result = module(*data.values())
    (result.sum() if result.dim() else result).backward()
    return {
        "family": model.family,
        "loss": None if model.output == "logits" else model.output,
        "objective": model.loss,
        "output": {"name": model.output, "shape": list(result.shape)},
        "inputs": {
            name: {"shape": list(value.shape), "dtype": str(value.numpy().dtype)}
            for name, value in data.items()
        },
        "parameters": [
            {**_fact(name, value), "trained": value.requires_grad, "reached": value.grad is not None}
            for name, value in module.named_parameters()
        ],
        "buffers": [_fact(name, value) for name, value in module.named_buffers()],
        "tied": list(_tied(module)),
        "parameter_elements": sum(value.numel() for value in module.parameters()),
    }


def _fact(name: str, value: torch.Tensor) -> dict[str, Any]:
    fact = {"name": name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    return fact | {"sha256": digest(value)}


def digest(value: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's float32 elements in C order."""
    array = value.detach().to(torch.float32).contiguous().numpy()
    return hashlib.sha256(array.tobytes()).hexdigest()


def _tied(module: nn.Module) -> Iterator[list[str]]:
    names: dict[int, list[str]] = {}
    for name, value in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), []).append(name)
    return (group for group in names.values() if len(group) > 1)


def _names_of(name: str, tied: list[list[str]]) -> list[str]:
    return next((group for group in tied if name in group), [name])


def _fresh(folder: Path, name: str) -> Path:
    return folder / f".{os.getpid()}.{name}"


def _keep(folder: Path, name: str) -> None:
    _fresh(folder, name).rename(folder / name)


def export_missing(folder: Path, models: list[Model]) -> None:
    """Export what the folder lacks; note in NAME.failed.txt what PyTorch does not export."""
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.WARNING)
    for model in models:
        failed = folder / f"{model.name}.failed.txt"
        if (folder / f"{model.name}.json").exists():
            continue
        try:
            export(model, folder)
            failed.unlink(missing_ok=True)
            print(f"{model.name}: exported", flush=True)
        except Exception as error:
            failed.write_text("".join(traceback.format_exception(error)))
            print(f"{model.name}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}", flush=True)


if __name__ == "__main__":
    from tests.peers.zoo.catalogue import MODELS

    wanted = sys.argv[2:]
    export_missing(Path(sys.argv[1]), [m for m in MODELS.values() if not wanted or m.name in wanted])
