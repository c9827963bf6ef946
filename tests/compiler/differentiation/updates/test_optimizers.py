"""Five steps of every optimizer equal PyTorch's, dense and sparse, and refuse settings that mean nothing."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.adafactor import Adafactor
from partc.compiler.differentiation.updates.adam import LAMB, Adam, AdamW, RMSProp
from partc.compiler.differentiation.updates.optimizers import OPTIMIZERS, SGD, Adagrad, Momentum, Optimizer
from partc.runtime.errors import BadUsage
from tests.checks.optimizer_references import (
    DENSE_LOOKUP,
    LINEAR,
    LOOKUP,
    REFERENCES,
    STACKED,
    assert_equals_reference,
    batches,
    step_of,
)
from tests.checks.training_steps import facts_of, train

DECAY = 0.2
ADAFACTOR = Adafactor(0.1, epsilon1=1e-7)
CASES: dict[str, tuple[str, Optimizer]] = {
    "sgd": (LINEAR, SGD(0.1, DECAY)),
    "momentum": (LINEAR, Momentum(0.1, 0.8, weight_decay=DECAY)),
    "nesterov": (LINEAR, Momentum(0.1, 0.8, nesterov=True, weight_decay=DECAY)),
    "adagrad": (LINEAR, Adagrad(0.1, initial_accumulator=0.0, weight_decay=DECAY, lr_decay=0.1)),
    "rmsprop": (LINEAR, RMSProp(0.1, weight_decay=DECAY)),
    "rmsprop-centered": (LINEAR, RMSProp(0.1, centered=True)),
    "rmsprop-momentum": (LINEAR, RMSProp(0.1, centered=True, momentum=0.8)),
    "adam": (LINEAR, Adam(0.1, weight_decay=DECAY)),
    "adamw": (LINEAR, AdamW(0.1, weight_decay=DECAY)),
    "lamb": (LINEAR, LAMB(0.1, weight_decay=DECAY)),
    "adafactor": (LINEAR, replace(ADAFACTOR, weight_decay=DECAY)),
    "adafactor-stacked": (STACKED, ADAFACTOR),
    "table-sgd": (LOOKUP, SGD(0.1, DECAY)),
    "table-nesterov": (LOOKUP, Momentum(0.1, 0.8, nesterov=True, weight_decay=DECAY)),
    "table-adagrad": (LOOKUP, Adagrad(0.1, initial_accumulator=0.0)),
    "table-rmsprop": (LOOKUP, RMSProp(0.1)),
    "table-rmsprop-momentum": (LOOKUP, RMSProp(0.1, centered=True, momentum=0.8)),
    "table-adam": (LOOKUP, Adam(0.1, weight_decay=DECAY)),
    "table-adamw": (LOOKUP, AdamW(0.1, weight_decay=DECAY)),
    "table-lamb": (LOOKUP, LAMB(0.1, weight_decay=DECAY)),
    "table-adafactor": (LOOKUP, replace(ADAFACTOR, weight_decay=DECAY)),
    "lazy-adam": (LOOKUP, Adam(0.1, lazy=True)),
}
UNREAD = 5  # the row of E that no batch reads


@pytest.mark.parametrize("case", CASES)
def test_five_steps_equal_pytorchs(case: str) -> None:
    text, optimizer = CASES[case]

    _, after = train(step_of(text, optimizer), batches(text))

    assert_equals_reference(case, after)


@pytest.mark.parametrize(
    "optimizer",
    [
        *OPTIMIZERS.values(),
        SGD(0.1, DECAY, decoupled=True),
        Momentum(0.1, weight_decay=DECAY, decoupled=True),
    ],
    ids=repr,
)
def test_a_sparse_update_equals_the_dense_one(optimizer: Optimizer) -> None:
    sparse, dense = step_of(LOOKUP, optimizer), step_of(DENSE_LOOKUP, optimizer)

    (_, after), (_, expected) = train(sparse, batches(LOOKUP)), train(dense, batches(LOOKUP))

    assert "rows" in facts_of(sparse)["gradients"]["E"]
    assert "dense" in facts_of(dense)["gradients"]["E"]
    assert after.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(after[name], expected[name], rtol=1e-11, atol=1e-14, err_msg=name)


def test_adafactors_rows_of_a_table_of_matrices_are_sparse_too() -> None:
    """Every entry of axis 0 has row and column means of its own."""
    table = np.random.default_rng(5).normal(size=(6, 2, 3))
    batch = {"ids": np.array([4, 1, 4]), "targets": np.ones((3, 2, 3))}
    after = []
    for text in (LOOKUP, DENSE_LOOKUP):
        model = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 21]> test {text}'.replace("[batch,2]", "[batch,2,3]")
        )
        model.graph.initializer.append(numpy_helper.from_array(table, "E"))
        step = build_training_graph(model, loss="mse", optimizer=Adafactor(0.1))
        after.append(train(step, [batch] * 3)[1])

    for name, value in after[1].items():
        np.testing.assert_allclose(after[0][name], value, rtol=1e-11, err_msg=name)


LAZY = [
    SGD(0.1, DECAY, lazy=True),
    SGD(0.1, DECAY, decoupled=True, lazy=True),
    Momentum(0.1, weight_decay=DECAY, lazy=True),
    Momentum(0.1, nesterov=True, weight_decay=DECAY, decoupled=True, lazy=True),
    RMSProp(0.1, momentum=0.5, centered=True, weight_decay=DECAY, lazy=True),
    AdamW(0.1, lazy=True),
]


@pytest.mark.parametrize("optimizer", LAZY, ids=repr)
def test_a_lazy_update_leaves_unread_rows_as_they_are(optimizer: Optimizer) -> None:
    _, after = train(step_of(LOOKUP, optimizer), batches(LOOKUP))

    start = REFERENCES["start/E"]
    np.testing.assert_array_equal(after["E"][UNREAD], start[UNREAD])
    assert (after["E"][:UNREAD] != start[:UNREAD]).all()


@pytest.mark.parametrize("optimizer", [o for o in LAZY if not isinstance(o, AdamW)], ids=repr)
def test_a_lazy_update_of_rows_that_are_always_read_equals_the_exact_one(optimizer: Optimizer) -> None:
    every_row = {"ids": np.arange(6), "targets": np.ones((6, 2))}

    _, lazy = train(step_of(LOOKUP, optimizer), [every_row] * 3)
    _, exact = train(step_of(LOOKUP, replace(optimizer, lazy=False)), [every_row] * 3)

    for name in exact:
        np.testing.assert_allclose(lazy[name], exact[name], rtol=1e-12, err_msg=name)


def test_a_sparse_table_is_written_row_by_row_where_the_optimizer_allows() -> None:
    for optimizer in (SGD(), Adagrad(), RMSProp(), Adafactor(), Adam(lazy=True)):
        step = step_of(LOOKUP, optimizer)
        makers = {name: node for node in step.graph.node for name in node.output}
        maker = makers[facts_of(step)["state"]["E"]]

        assert (maker.op_type, maker.input[0]) == ("ScatterND", "E"), optimizer


@pytest.mark.parametrize(
    ("make", "at", "fix"),
    [
        (lambda: Adam(beta1=1.0), "optimizer Adam, beta1", "from 0 to below 1"),
        (lambda: SGD(weight_decay=-1.0), "optimizer SGD, weight_decay", "at least 0"),
        (lambda: Adafactor(d=0.0), "optimizer Adafactor, d", "positive"),
        (lambda: LAMB("often"), "optimizer LAMB, lr", "at least 0"),  # type: ignore[arg-type]
        (lambda: RMSProp(float("nan")), "optimizer RMSProp, lr", "at least 0"),
        (lambda: SGD(1e-50), "optimizer SGD, lr", "from 1.4"),
        (lambda: SGD(10**400), "optimizer SGD, lr", "to 3.40282347e+38, or 0"),
        (lambda: Adam(beta1=1 - 1e-9), "optimizer Adam, beta1", "to 0.99999994, or 0"),
        (lambda: Adam(epsilon=1e-60), "optimizer Adam, epsilon", "or 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(make, at: str, fix: str) -> None:
    with pytest.raises(BadUsage) as error:
        make()

    assert error.value.at == at
    assert fix in error.value.fix
