import json

import numpy as np
import onnx

from partc.models.catalogue import build_model
from partc.models.graph_builder import METADATA_KEY
from partc.models.resnet import ResNetOptions, resnet50
from tests.builders.graphs.forward_models import parameter_sizes, run_with_parameters

TINY = ResNetOptions(width=4, image=32, classes=10)


def state_of(model: onnx.ModelProto) -> dict[str, str]:
    properties = {entry.key: entry.value for entry in model.metadata_props}
    state: dict[str, str] = json.loads(properties[METADATA_KEY])["state"]
    return state


def test_parameters_number_as_published() -> None:
    sizes = parameter_sizes(resnet50(ResNetOptions()))

    assert sum(sizes.values()) == 25_557_032
    assert sum(size for name, size in sizes.items() if name.endswith(".weight")) == 25_502_912


def test_resnet101_has_more_blocks_and_is_otherwise_the_same() -> None:
    model = build_model("resnet101", batch=None)
    sizes = parameter_sizes(model)

    assert sum(sizes.values()) == 44_549_160
    assert sum(node.op_type == "Conv" for node in model.graph.node) == 1 + 3 * (3 + 4 + 23 + 3) + 4
    same = build_model("resnet50", blocks="3,4,23,3".split(","))
    assert list(same.graph.node) == list(model.graph.node)


def test_a_tiny_one_runs_and_renews_its_running_statistics() -> None:
    model = resnet50(TINY)
    x = np.random.default_rng(0).normal(size=(4, 3, 32, 32)).astype(np.float32)

    logits, _ = run_with_parameters(model, "logits", {"x": x})
    mean, _ = run_with_parameters(model, "stem.running_mean_next", {"x": x})

    assert logits.shape == (4, 10)
    assert np.isfinite(logits).all()
    assert np.abs(mean).max() > 0


def test_images_shrink_as_in_the_paper() -> None:
    inferred = onnx.shape_inference.infer_shapes(resnet50(ResNetOptions()), data_prop=True)
    shapes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim[1:]] for v in inferred.graph.value_info
    }

    last = [
        shapes[f"stage{stage}.{count - 1}.up.normalised"]
        for stage, count in enumerate(ResNetOptions().blocks)
    ]

    assert last == [[256, 56, 56], [512, 28, 28], [1024, 14, 14], [2048, 7, 7]]


def test_every_batch_norm_trains_and_declares_its_state() -> None:
    model = resnet50(TINY)

    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    renewed = {}
    for node in norms:
        renewed |= dict(zip(node.input[3:], node.output[1:], strict=True))

    assert len(norms) == 53
    assert renewed == state_of(model)
