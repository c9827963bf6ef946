"""Old forward models of the onnx package, as they are."""

from pathlib import Path

import numpy as np
import onnx
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD, Momentum
from tests.checks.training_steps import Arrays, facts_of, train

LIGHT_MODELS = {"light_resnet50": 1e-4, "light_bvlc_alexnet": 1e-4, "light_inception_v1": 1e-3}  # steps
OTHER_MODELS = {
    "light_densenet121": 1e-2,
    "light_inception_v2": 1e-2,
    "light_shufflenet": 1e-4,
    "light_squeezenet": 1e-4,
    "light_vgg19": 1e-4,
    "light_zfnet512": 1e-4,
}
QUICK = ("light_shufflenet", "light_squeezenet")
LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


def light_batch(model: onnx.ModelProto, samples: int) -> Arrays:
    state = facts_of(model)["state"]
    image = next(value.name for value in model.graph.input if value.name not in {*state, "labels"})
    rng = np.random.default_rng(0)
    return {
        image: rng.normal(size=(samples, 3, 224, 224)).astype(np.float32),
        "labels": rng.integers(0, 1000, samples),
    }


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        ("light_bvlc_alexnet", 4),
        ("light_inception_v1", "dynamic"),
        pytest.param("light_resnet50", 4, marks=pytest.mark.long),
        pytest.param("light_resnet50", "dynamic", marks=pytest.mark.long),
        pytest.param("light_bvlc_alexnet", "dynamic", marks=pytest.mark.long),
        pytest.param("light_inception_v1", 4, marks=pytest.mark.long),
    ],
)
def test_light_models_train_at_another_batch_size(name: str, batch_size: int | str) -> None:
    forward = onnx.load(LIGHT / f"{name}.onnx")
    model = build_training_graph(
        forward,
        loss="softmax_cross_entropy",
        optimizer=SGD(LIGHT_MODELS[name]),
        batch_size=batch_size,
        reinit=1,
    )

    steps = 3 if batch_size == 4 else 1
    losses, _ = train(model, [light_batch(model, 4 if batch_size == 4 else 2)] * steps)

    assert np.isfinite(losses).all()
    assert losses == sorted(losses, reverse=True)
    names = [node.name for node in model.graph.node]
    assert all(names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in OTHER_MODELS]
)
def test_the_other_light_models_train_one_step(name: str) -> None:
    forward = onnx.load(LIGHT / f"{name}.onnx")
    model = build_training_graph(
        forward,
        loss="softmax_cross_entropy",
        optimizer=SGD(OTHER_MODELS[name]),
        batch_size=1,
        reinit=1,
    )

    losses, _ = train(model, [light_batch(model, 1)] * 2)

    assert np.isfinite(losses).all()
    assert losses[1] < losses[0]


def test_light_resnet50_as_it_is_knows_its_parameters() -> None:
    model = build_training_graph(
        onnx.load(LIGHT / "light_resnet50.onnx"), loss="softmax_cross_entropy", optimizer=SGD()
    )

    gradients = facts_of(model)["gradients"]

    assert len(gradients) == 53 * 3 + 2  # convolutions with scale and bias, and the dense layer
    assert not any("riv" in name or "_rm_" in name for name in gradients)


def test_building_twice_gives_equal_bytes() -> None:
    forward = onnx.load(LIGHT / "light_inception_v1.onnx")
    built = [
        build_training_graph(
            forward, loss="softmax_cross_entropy", optimizer=Momentum(), batch_size=4, reinit=1
        ).SerializeToString(deterministic=True)
        for _ in range(2)
    ]

    assert built[0] == built[1]
