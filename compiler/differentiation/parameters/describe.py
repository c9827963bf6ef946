"""Tell what is trained and what is not: one line per reason, with counts, sizes and names."""

from collections.abc import Iterable, Mapping, Sequence

import onnx
from onnx import numpy_helper

from partc.compiler.differentiation.parameters.decision import ParameterDecision, Verdict
from partc.compiler.differentiation.parameters.exporter_facts import (
    ExporterFacts,
    exporter_facts,
    merged_parameters,
)
from partc.compiler.differentiation.tensor_types import Types, element_count
from partc.compiler.report.units import count, plural, size

MAX_NAMES = 4  # that a line lists
PLAIN = str.maketrans({"\u00a0": " "})  # a terminal breaks no line here


def describe_choice(
    forward: onnx.ModelProto, types: Types, decisions: Mapping[str, ParameterDecision]
) -> list[str]:
    """Return lines about the tensors that move the loss, and about parameters that the exporter changed."""
    lines = []
    for verdict, noun in ((Verdict.TRAINED, "parameter"), (Verdict.CONSTANT, "tensor")):
        matching = {name: d for name, d in decisions.items() if d.verdict is verdict}
        if not matching:
            continue
        sizes = [_elements(types, name) for name in matching]
        stored_bytes = sum(n * types[name].dtype.itemsize for n, name in zip(sizes, matching, strict=True))
        total = f"{plural(len(matching), noun)}, {plural(sum(sizes), 'element')}, {size(stored_bytes)}"
        lines.append(f"{verdict.value}: {total}")
        lines += [
            f"  {count(len(names))} {reason}: {_join_names(names)}" for reason, names in _groups(matching)
        ]
    facts = exporter_facts(forward)
    lines += _describe_merged(facts, forward.graph, decisions) + _describe_copies(forward.graph, decisions)
    return [line.translate(PLAIN) for line in lines]


def _groups(decisions: Mapping[str, ParameterDecision]) -> list[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for name, decision in decisions.items():
        groups.setdefault(decision.reason, []).append(_with_source(name, decision))
    return list(groups.items())


def _with_source(name: str, decision: ParameterDecision) -> str:
    return f"{name} (of {decision.source})" if decision.source else name


def _describe_merged(
    facts: ExporterFacts, graph: onnx.GraphProto, decisions: Mapping[str, ParameterDecision]
) -> list[str]:
    """Tell of variables that stand for several parameters: they train as one."""
    merged = {n: others for n, others in merged_parameters(facts, graph).items() if n in decisions}
    merged_into = {n: others for n, others in merged.items() if decisions[n].verdict is Verdict.TRAINED}
    if not merged_into:
        return []
    merged_count = sum(len(others) for others in merged_into.values())
    names = [f"{name} for {_join_names(others)}" for name, others in merged_into.items()]
    text = (
        f"{plural(merged_count, 'parameter')} {'train' if merged_count > 1 else 'trains'} as part of another"
    )
    return [
        f"merged by the exporter, for their values were equal: {text}; optimize=False keeps them apart",
        *(f"  {line}" for line in names[:MAX_NAMES]),
    ]


def _describe_copies(graph: onnx.GraphProto, decisions: Mapping[str, ParameterDecision]) -> list[str]:
    """Tell of a parameter that is stored twice, once transposed: its copies train apart."""
    matrices = {
        t.name: t
        for t in graph.initializer
        if t.name in decisions and decisions[t.name].verdict is Verdict.TRAINED and len(t.dims) == 2
    }
    computed = [name for name in matrices if decisions[name].source]
    copies = [
        f"{name} of {other}"
        for name in computed
        for other in matrices
        if other not in computed and _is_transposed(matrices[name], matrices[other])
    ]
    if not copies:
        return []
    text = "stored twice by the exporter, so that both copies train apart"
    return [f"{text}: {_join_names(copies)}; optimize=False stores one"]


def _is_transposed(tensor: onnx.TensorProto, other: onnx.TensorProto) -> bool:
    if tuple(tensor.dims) != tuple(reversed(other.dims)) or tensor.external_data or other.external_data:
        return False
    return bool((numpy_helper.to_array(other) == numpy_helper.to_array(tensor).T).all())


def _elements(types: Types, name: str) -> int:
    return element_count(n if isinstance(n, int) else 0 for n in types[name].shape or ())


def _join_names(names: Iterable[str]) -> str:
    sequence: Sequence[str] = list(names)
    rest = len(sequence) - MAX_NAMES
    return ", ".join(sequence[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
