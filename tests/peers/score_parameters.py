"""Hold partc's decision, what is a parameter, against a PyTorch module's own parameters and buffers.

The truth comes from the module: names, shapes and hashes of values. An initializer is a parameter where its
values are one's, as they are or transposed; where several fit (zero biases), its name decides. One that the
exporter computed is judged by its values: where they are some of a parameter's, each as often at most, it
is that parameter rearranged.
"""

import ast
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from partc.compiler.differentiation.objective import weigh_parameters
from partc.compiler.differentiation.parameters.decision import ParameterDecision, Verdict

Stored = tuple[str, tuple[int, ...], str]  # a tensor of the module: name, shape, sha256 of its float32 bytes


@dataclass(frozen=True)
class ParameterScore:
    """Initializers that move the loss, with the reason of what partc decided.

    `undecided` are refused until --train or --freeze names them: neither wrong nor right.
    """

    wrongly_trained: dict[str, str] = field(default_factory=dict)
    wrongly_frozen: dict[str, str] = field(default_factory=dict)
    undecided: dict[str, str] = field(default_factory=dict)
    trained: int = 0
    constant: int = 0


@dataclass(frozen=True)
class _Truth:
    parameters: Mapping[str, str]  # name -> sha256
    buffers: Mapping[str, str]
    values: Mapping[str, np.ndarray]  # of parameters, where they are known

    def is_parameter(self, name: str, array: np.ndarray, sources: frozenset[str]) -> bool:
        """Tell whether an initializer holds a parameter, whole or in part."""
        hashes = {_sha256(array), _sha256(array.T)}
        if name in self.parameters and not sources:
            return True  # also where normalisation was folded into it
        if name in self.buffers:
            return False
        if hashes & set(self.parameters.values()):
            return True
        parts = [self.values[source] for source in sources if source in self.values]
        return bool(parts) and _is_part(array, np.concatenate([part.ravel() for part in parts]))

    def holds_parameter(self, name: str, array: np.ndarray, sources: frozenset[str]) -> bool:
        """Tell whether freezing an initializer freezes a parameter, or what was computed from one."""
        if name in self.buffers:
            return False
        is_equal = array.size > 1 and bool({_sha256(array), _sha256(array.T)} & set(self.parameters.values()))
        is_ambiguous = _sha256(array) in self.buffers.values()
        return (
            name in self.parameters
            or bool(sources & self.parameters.keys())
            or (is_equal and not is_ambiguous)
        )


def score_parameters(
    model: onnx.ModelProto,
    loss: str,
    parameters: Iterable[Stored],
    buffers: Iterable[Stored],
    *,
    folder: Path | None = None,
    unoptimised: onnx.ModelProto | None = None,
) -> ParameterScore:
    """Return what partc would train wrongly, freeze wrongly, or refuse, of an export of a module.

    `loss` is as for `partc grad`; `parameters` are those that the module trains, `buffers` all its other
    tensors. `unoptimised` is the same module exported with optimize=False: it holds the parameters' values.
    """
    decisions = weigh_parameters(model, loss, folder)
    known = {name: digest for name, _, digest in parameters}
    values = _floats(unoptimised, None) if unoptimised is not None else {}
    truth = _Truth(
        known,
        {name: digest for name, _, digest in buffers},
        {name: array for name, array in values.items() if name in known},
    )
    sources = _folded_from(model)
    score = ParameterScore(
        trained=sum(d.verdict is Verdict.TRAINED for d in decisions.values()),
        constant=sum(d.verdict is Verdict.CONSTANT for d in decisions.values()),
    )
    for name, array in _floats(model, folder).items():
        if name in decisions:
            _judge(score, truth, name, array, sources.get(name, frozenset()), decisions[name])
    return score


def _judge(
    score: ParameterScore,
    truth: _Truth,
    name: str,
    array: np.ndarray,
    sources: frozenset[str],
    decision: ParameterDecision,
) -> None:
    if decision.verdict is Verdict.UNDECIDED:
        score.undecided[name] = decision.reason
    elif decision.verdict is Verdict.TRAINED and not truth.is_parameter(name, array, sources):
        score.wrongly_trained[name] = decision.reason
    elif decision.verdict is Verdict.CONSTANT and truth.holds_parameter(name, array, sources):
        score.wrongly_frozen[name] = decision.reason


def _floats(model: onnx.ModelProto, folder: Path | None) -> dict[str, np.ndarray]:
    arrays = {
        t.name: numpy_helper.to_array(t, str(folder or ""))
        for t in model.graph.initializer
        if t.data_type in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def _folded_from(model: onnx.ModelProto) -> dict[str, frozenset[str]]:
    return {
        value.name: frozenset(ast.literal_eval(entry.value))
        for value in model.graph.value_info
        for entry in value.metadata_props
        if entry.key.endswith("folded_from")
    }


def _is_part(array: np.ndarray, whole: np.ndarray) -> bool:
    """Tell whether every value of an array occurs in another at least as often."""
    values, counts = np.unique(array, return_counts=True)
    all_values, all_counts = np.unique(whole, return_counts=True)
    available = dict(zip(all_values.tolist(), all_counts.tolist(), strict=True))
    return all(
        available.get(value, 0) >= count
        for value, count in zip(values.tolist(), counts.tolist(), strict=True)
    )


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array, np.float32).tobytes()).hexdigest()
