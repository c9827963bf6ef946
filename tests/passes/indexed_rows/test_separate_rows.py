"""One tensor is the gradient of several parameters: rows for one, dense or rows of shared ids for others.

Steps are plain SGD, which is linear in the gradient: N replicas' next value is the mean of those that each
replica would have computed alone.
"""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from partc.compiler.importing.bindings import Bindings, GradientTensors, write_bindings
from partc.compiler.importing.import_training import import_training_graph
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.replicas.average_replicas import average_replicas
from partc.passes.roles.find_roles import find_roles
from partc.runtime.errors import UnsupportedModel
from partc.runtime.execution.in_process import train_in_process
from tests.builders.graphs.foreign_steps import parse
from tests.builders.graphs.small_steps import line_of
from tests.builders.plans.compiled_steps import Batch, compile_step, random_batches

FORWARD = "d0 = Sub (x, y) sq = Mul (d0, d0) loss = ReduceMean <keepdims = 0> (sq) d = Mul (d0, rate)"
TABLE = 'p{n} = Unsqueeze ({ids}, last) m{n} = Neg ({rows}) {E}_next = ScatterND <reduction = "add">'
TABLE += " ({E}, p{n}, m{n})"


def step_of(inputs: str, variables: dict[str, int], forward: str, update: str) -> str:
    """Return a step's text. `variables`: name -> rows of two elements each."""
    declared = "".join(f", double[{rows},2] {name}" for name, rows in variables.items())
    following = "".join(f", double[{rows},2] {name}_next" for name, rows in variables.items())
    return (
        f"step ({inputs}, double[4,2] y{declared}) => (double loss{following})"
        f" <int64[1] last = {{-1}}, double rate = {{0.25}}> {{ {forward} {FORWARD} {update} }}"
    )


def table(n: int, name: str, ids: str, rows: str) -> str:
    return TABLE.format(n=n, E=name, ids=ids, rows=rows)


DENSE_AND_ROWS = step_of(
    "int64[4] ids",
    {"E": 9, "P": 4},
    "e = Gather (E, ids) x = Add (e, P)",
    table(0, "E", "ids", "d") + " P_next = Sub (P, d)",
)
ONE_NEGATION_FOR_BOTH = step_of(
    "int64[4] ids",
    {"E": 9, "P": 4},
    "e = Gather (E, ids) x = Add (e, P)",
    table(0, "E", "ids", "d") + " P_next = Add (P, m0)",
)
SHARED_AND_OWN_IDS = step_of(
    "int64[4] ids, int64[4] shared",
    {"E": 9, "F": 9},
    "e = Gather (E, ids) f = Gather (F, shared) x = Add (e, f)",
    table(0, "F", "shared", "d") + table(1, "E", "ids", "d"),
)
TABLE_READ_BOTH_WAYS = step_of(
    "int64[4] ids, int64[4] shared",
    {"E": 9, "P": 4},
    "e = Gather (E, ids) f = Gather (E, shared) g = Add (e, f) x = Add (g, P)",
    "all_ids = Concat <axis = 0> (ids, shared) rows = Concat <axis = 0> (d, d)"
    + table(0, "E", "all_ids", "rows")
    + " P_next = Sub (P, d)",
)
THREE_KINDS = step_of(
    "int64[4] ids, int64[4] shared, int64[4] others",
    {"E": 9, "F": 9, "G": 9, "P": 4},
    "e = Gather (E, ids) f = Gather (F, shared) g = Gather (G, others) x = Sum (e, f, g, P)",
    "P_next = Sub (P, d)"
    + table(0, "E", "ids", "d")
    + table(1, "F", "shared", "d")
    + table(2, "G", "others", "d"),
)
SCALED_TWICE = step_of(
    "int64[4] ids",
    {"E": 9, "P": 4},
    "e = Gather (E, ids) x = Add (e, P)",
    "h = Mul (d, rate) twice = Mul (h, rate)" + table(0, "E", "ids", "twice") + " P_next = Sub (P, h)",
)
INTO_ZEROS = 'd{E} = ScatterND <reduction = "add"> (zeros, p{E}, d) {E}_next = Sub ({E}, d{E}) '
SCATTERED_INTO_ZEROS = step_of(
    "int64[4] ids, int64[4] shared",
    {"E": 9, "F": 9},
    "e = Gather (E, ids) f = Gather (F, shared) x = Add (e, f)",
    "pE = Unsqueeze (ids, last) pF = Unsqueeze (shared, last) nine = Constant <value_ints = [9, 2]> ()"
    " zeros = ConstantOfShape <value = double[1] {0}> (nine) "
    + INTO_ZEROS.format(E="E")
    + INTO_ZEROS.format(E="F"),
)
OF = GradientTensors
STEPS = {
    "dense and rows": (DENSE_AND_ROWS, {"E": OF(ids="ids", rows="d"), "P": OF(dense="d")}),
    "one negation for both": (ONE_NEGATION_FOR_BOTH, {"E": OF(ids="ids", rows="d"), "P": OF(dense="d")}),
    "shared and own ids": (
        SHARED_AND_OWN_IDS,
        {"F": OF(ids="shared", rows="d"), "E": OF(ids="ids", rows="d")},
    ),
    "a table read both ways": (
        TABLE_READ_BOTH_WAYS,
        {"E": OF(ids="all_ids", rows="rows"), "P": OF(dense="d")},
    ),
    "three kinds": (
        THREE_KINDS,
        {
            "P": OF(dense="d"),
            "F": OF(ids="shared", rows="d"),
            "E": OF(ids="ids", rows="d"),
            "G": OF(ids="others", rows="d"),
        },
    ),
    "scaled twice": (SCALED_TWICE, {"E": OF(ids="ids", rows="d"), "P": OF(dense="d")}),
    "found": (SCATTERED_INTO_ZEROS, {}),
}
AXES = {"ids": 0, "others": 0, "y": 0, "shared": None}


def training_of(name: str, **axes: int) -> TrainingGraph:
    text, gradients = STEPS[name]
    model = parse(text)
    inputs = [info.name for info in model.graph.input]
    state = {name: f"{name}_next" for name in inputs if name not in AXES}
    known = {name: axis for name, axis in (AXES | axes).items() if name in inputs}
    write_bindings(model, Bindings(state=state, loss="loss", gradients=gradients, sample_axes=known))
    rng = np.random.default_rng(0)
    for info in model.graph.input:
        if info.name in state:
            shape = [size.dim_value for size in info.type.tensor_type.shape.dim]
            model.graph.initializer.append(onnx.numpy_helper.from_array(rng.normal(size=shape), info.name))
    return import_training_graph(model)


def trained_apart(training: TrainingGraph, batches: list[Batch], replicas: int) -> Batch:
    """Return the variables after steps in each of which every replica starts from the mean of all."""
    session = ort.InferenceSession(training.source, providers=["CPUExecutionProvider"])
    values = {variable.name: variable.initial.load() for variable in training.variables.values()}
    for batch in batches:
        results = []
        for replica in range(replicas):
            rows = slice(4 * replica, 4 * replica + 4)
            feeds = {n: v if AXES[n] is None else v[rows] for n, v in batch.items()}
            results.append(session.run([f"{name}_next" for name in values], {**feeds, **values}))
        values = dict(
            zip(values, (np.mean(parts, axis=0) for parts in zip(*results, strict=True)), strict=True)
        )
    return values


@pytest.mark.parametrize("name", STEPS)
def test_replicas_update_every_parameter_by_the_mean(tmp_path: Path, name: str) -> None:
    training = training_of(name)
    assert training.gradients["E"].is_sparse
    compiled = compile_step(training, tmp_path / "out", "1x3", "hybrid")
    batches = random_batches(compiled.plan, steps=2, high=9)

    result = train_in_process(compiled.folder, batches)

    expected = trained_apart(training, batches, compiled.plan.replicas)
    for variable, value in expected.items():
        np.testing.assert_allclose(result.variables[variable], value, rtol=1e-12, atol=1e-12)
    assert result.disagreeing == ()


def test_rows_that_all_replicas_lay_in_a_row_are_laid_once() -> None:
    training = training_of("shared and own ids", shared=0)

    result = average_replicas(training, set(find_roles(training).main))

    lines = [line_of(node) for node in result.graph.nodes]
    assert lines.count("d.stacked = Stack (d)") == 1
    assert not any(node.op == "Identity" for node in result.graph.nodes)


def test_rows_that_never_meet_their_ids_are_refused() -> None:
    training = training_of("dense and rows")
    (update,) = (node for node in training.graph.nodes if node.op == "ScatterND")
    positions = update.inputs[1].inputs[0]

    with pytest.raises(UnsupportedModel, match="compile with --batch global"):
        average_replicas(training, set(find_roles(training).main) | {positions.name})
