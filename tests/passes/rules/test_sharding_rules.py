"""Every sharding rule, held against its op: run in parts and put together, an op gives the whole.

Each case is one node. Every place on every axis where its rule allows a split is tried: pieces of the
inputs go through the op rank by rank, and what comes out is joined, summed, averaged or compared.
Every way of giving it partial operands is tried as well.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import product

import numpy as np
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from partc.passes.graph.infer_facts import infer_facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.decide_layouts import split_on
from partc.passes.layouts.decisions import AxisDecision
from partc.passes.layouts.layouts import Partial, Placement, Split
from partc.passes.lowering.lower_node import local_bounds
from partc.passes.rules.sharding_rule import Dims, ShardingRule
from partc.passes.rules.sharding_rules import RULES, NodeFacts, node_facts
from tests.builders.graphs.foreign_steps import parse
from tests.builders.graphs.sharding_cases import CASES
from tests.sampling import sampled

DEGREES = (2, 3, 4)
OPERAND = re.compile(r"\w+\{[^}]*\}|\w+(?:\[[^]]*\])? \w+")


@dataclass(frozen=True)
class Case:
    """One node, what is known of it, its rule, and operands to run it on."""

    node: gs.Node
    known: NodeFacts
    rule: ShardingRule
    dtypes: Mapping[str, np.dtype]
    feeds: list[np.ndarray]

    def run(self, feeds: list[np.ndarray]) -> list[np.ndarray]:
        copy = gs.Node(self.node.op, "node", dict(self.node.attrs), self._named(feeds))
        copy.outputs = [gs.Variable(f"out{index}") for index in range(len(self.node.outputs))]
        graph = gs.Graph([copy], copy.inputs, copy.outputs, opset=21)
        for variable, array in zip(copy.inputs, feeds, strict=True):
            variable.dtype, variable.shape = array.dtype, array.shape
        for variable, tensor in zip(copy.outputs, self.node.outputs, strict=True):
            variable.dtype = self.dtypes[tensor.name]
        model = gs.export_onnx(graph, do_type_check=False)
        model.ir_version = 10
        named = {f"in{index}": array for index, array in enumerate(feeds)}
        if feeds[0].dtype == np.float32:  # where the standard's own evaluator is wrong
            providers = ["CPUExecutionProvider"]
            session = ort.InferenceSession(model.SerializeToString(), providers=providers)
            return [np.asarray(result) for result in session.run(None, named)]
        return [np.asarray(result) for result in ReferenceEvaluator(model).run(None, named)]

    def _named(self, feeds: list[np.ndarray]) -> list[gs.Variable]:
        return [gs.Variable(f"in{index}") for index in range(len(feeds))]


def case_of(text: str) -> Case:
    """Read a case: operands with random values, and constants in braces."""
    operands, call = text.split(" -> ", 1)
    rng = np.random.default_rng(len(text))
    feeds: dict[str, np.ndarray] = {}
    inputs, constants = [], []
    for operand in OPERAND.findall(operands):
        _read_operand(operand, rng, feeds, inputs, constants)
    results = "a, b" if call.startswith(("Split", "TopK")) else "result"
    text = f"step ({', '.join(inputs)}) => ({results}) <{', '.join(constants)}> {{ {results} = {call} }}"
    model = parse(text)
    graph = gs.import_onnx(model)
    graph.outputs = []  # their types are for inference to find
    training = TrainingGraph(graph, {}, {}, (), None, {})
    node = graph.nodes[0]
    facts = infer_facts(training, {})
    known = node_facts(node, facts)
    assert known.rule is not None
    return Case(node, known, known.rule, facts.dtypes, [feeds[tensor.name] for tensor in node.inputs])


def _read_operand(
    text: str, rng: np.random.Generator, feeds: dict[str, np.ndarray], inputs: list[str], constants: list[str]
) -> None:
    if "{" in text:
        name, values = text.rstrip("}").split("{")
        kind = "float" if name == "scales" else "int64"
        numbers = [(float if kind == "float" else int)(value) for value in values.split(",")]
        is_scalar = name in ("at", "depth")
        dtype = np.float32 if kind == "float" else np.int64
        feeds[name] = np.array(numbers[0] if is_scalar else numbers, dtype=dtype)
        constants.append(f"{kind}{'' if is_scalar else [len(numbers)]} {name} = {{{values}}}")
        return
    kind, name = text.split(" ")
    element, _, sizes = kind.rstrip("]").partition("[")
    shape = [int(size) for size in sizes.split(",")] if sizes else []
    feeds[name] = _draw(element, shape, rng)
    inputs.append(
        text.replace("id", "int64").replace("unique", "int64") if element in ("id", "unique") else text
    )


def _draw(element: str, shape: list[int], rng: np.random.Generator) -> np.ndarray:
    if element == "unique":
        return np.asarray(rng.permutation(10)[: int(np.prod(shape))].reshape(shape))
    if element in ("id", "int64"):
        return np.asarray(rng.integers(0, 10, shape))
    if element == "bool":
        return np.asarray(rng.random(shape) < 0.5)
    return np.asarray(
        rng.uniform(0.1, 0.9, shape), dtype={"double": "float64", "float": "float32"}.get(element)
    )


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("ranks", sampled(DEGREES, range(2)))
@pytest.mark.parametrize("text", CASES)
def test_an_op_in_parts_gives_the_whole(text: str, ranks: int) -> None:
    case = case_of(text)
    whole = case.run(case.feeds)

    for decision in splits_of(case, ranks):
        parts = [case.run(pieces_for(case, decision, whole, rank, ranks)) for rank in range(ranks)]
        for index, placement in enumerate(decision.outputs):
            together = combine([part[index] for part in parts], placement, decision.is_mean)
            assert together.shape == whole[index].shape, decision
            exact = 1e-5 if whole[index].dtype == np.float32 else 1e-9
            np.testing.assert_allclose(together, whole[index], exact, exact, err_msg=str(decision))


def _noise_of(array: np.ndarray) -> float:
    return 9.0 if array.dtype.kind == "i" else 1.0


@pytest.mark.parametrize("text", CASES)
def test_partial_operands_make_partial_results(text: str) -> None:
    case = case_of(text)
    whole = case.run(case.feeds)
    rng = np.random.default_rng(0)

    for partial in set(product(*case.rule.terms)):
        if (
            not case.rule.terms
            or not case.rule.linear.issuperset(partial)
            or len(set(partial)) < len(partial)
        ):
            continue
        terms = [list(case.feeds), list(case.feeds)]
        for index in partial:
            whole_operand = case.feeds[index]
            noise = np.asarray(rng.normal(size=whole_operand.shape, scale=_noise_of(whole_operand)))
            terms[0][index] = (case.feeds[index] - noise).astype(case.feeds[index].dtype)
            terms[1][index] = (case.feeds[index] - terms[0][index]).astype(case.feeds[index].dtype)
        if any(case.feeds[index].dtype.kind not in "fi" for index in partial):
            continue
        for one, other, result in zip(case.run(terms[0]), case.run(terms[1]), whole, strict=True):
            np.testing.assert_allclose(one + other, result, rtol=1e-6, atol=1e-6, err_msg=str(partial))


@pytest.mark.parametrize("text", [text for text in CASES if case_of(text).rule.moves])
def test_what_only_moves_elements_keeps_the_largest(text: str) -> None:
    case = case_of(text)
    if len(case.rule.terms) > 1:
        pytest.skip("several operands: no maximum passes")
    other = [case.feeds[0][..., ::-1].copy() if case.feeds[0].ndim else case.feeds[0], *case.feeds[1:]]
    larger = [np.maximum(case.feeds[0], other[0]), *case.feeds[1:]]

    results = zip(case.run(case.feeds), case.run(other), case.run(larger), strict=True)

    assert all(np.array_equal(np.maximum(one, two), both) for one, two, both in results)


def test_every_rule_has_a_case() -> None:
    covered = {text.split(" -> ", 1)[1].split("(")[0].split("<")[0].strip() for text in CASES}

    assert set(RULES) - covered == set()


def test_cases_do_split() -> None:
    tried = {text: len(list(splits_of(case_of(text), 2))) for text in CASES}

    assert {text for text, count in tried.items() if not count} == {
        "double[1,1] x, double[1] y -> Add(x, y)",
        "double[4,6] x, axes{6, 4} -> Reshape(x, axes)",
        'double[10,6] x, id[4,2] i, double[4,2] u -> ScatterElements <reduction = "add"> (x, i, u)',
    }
    assert sum(tried.values()) > 3 * len(tried)


# ---------------------------------------------------------------- pieces


def splits_of(case: Case, ranks: int) -> Iterator[AxisDecision]:
    """Yield what the rule makes of every place where an input or an output may be split."""
    rule, seen = case.rule, set()
    shapes = [array.shape for array in case.run(case.feeds)]
    sides: list[tuple[Dims, tuple[int, ...]]] = list(zip(rule.outputs, shapes, strict=True))
    sides += [(d, f.shape) for d, f in zip(rule.inputs, case.feeds, strict=True) if d is not None]
    for dims, shape in sides:
        for axis, size in enumerate(shape):
            for outer in [divisor for divisor in range(1, size + 1) if size % divisor == 0]:
                found = rule.factor_at(dims, axis, outer)
                if found is None or found[1] in found[0].whole or found[0].sizes[found[1]] % ranks:
                    continue
                decision = split_on(case.known, found[0], found[1], ranks)
                if decision is not None and decision not in seen:
                    seen.add(decision)
                    yield decision


def pieces_for(
    case: Case, decision: AxisDecision, whole: list[np.ndarray], rank: int, ranks: int
) -> list[np.ndarray]:
    """Cut the operands as the decision says, and spell a part's shape where a shape is spelled."""
    pieces = [
        cut(array, place, rank, ranks) for array, place in zip(case.feeds, decision.inputs, strict=True)
    ]
    for index, output in case.rule.shape_inputs.items():
        place = decision.outputs[output]
        if isinstance(place, Split):
            axis = place.axis - whole[output].ndim + len(pieces[index])
            if axis >= 0 and pieces[index][axis] == whole[output].shape[place.axis]:
                pieces[index] = pieces[index].copy()
                pieces[index][axis] //= ranks
    first = decision.inputs[0]
    parts = [
        ranks if isinstance(first, Split) and first.axis == axis else 1 for axis in range(case.feeds[0].ndim)
    ]
    for index, numbers in local_bounds(case.rule, lambda axis, number: number // parts[axis]).items():
        pieces[index] = np.array(numbers, case.feeds[index].dtype)
    return pieces


def cut(array: np.ndarray, placement: Placement, rank: int, ranks: int) -> np.ndarray:
    if not isinstance(placement, Split):
        return array
    axis, outer = placement.axis, placement.outer
    apart = array.reshape(*array.shape[:axis], outer, -1, *array.shape[axis + 1 :])
    piece = np.split(apart, ranks, axis=axis + 1)[rank]
    return piece.reshape(*array.shape[:axis], -1, *array.shape[axis + 1 :])


def combine(parts: list[np.ndarray], placement: Placement, is_mean: bool) -> np.ndarray:
    if isinstance(placement, Partial):
        how = {"sum": np.add, "max": np.maximum, "min": np.minimum}[placement.reduction]
        return np.asarray(reduce(how, parts) / (len(parts) if is_mean else 1))
    assert isinstance(placement, Split)
    axis, outer = placement.axis, placement.outer
    apart = [part.reshape(*part.shape[:axis], outer, -1, *part.shape[axis + 1 :]) for part in parts]
    joined = np.concatenate(apart, axis=axis + 1)
    return np.asarray(joined.reshape(*parts[0].shape[:axis], -1, *parts[0].shape[axis + 1 :]))
