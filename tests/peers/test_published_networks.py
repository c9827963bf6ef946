"""Convolutional networks of models/ beside torchvision's: as many parameters, of the same shapes."""

from collections import Counter
from collections.abc import Callable

import onnx
import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.peers, pytest.mark.long]  # `make test-peers-all` installs torchvision

from tests.peers.zoo.vision_libraries import IS_THERE  # noqa: E402

if not IS_THERE:
    pytest.skip("torchvision is installed by make test-peers-all", allow_module_level=True)

import torch  # noqa: E402
import torchvision.models as published  # noqa: E402

from partc.models.catalogue import build_model  # noqa: E402
from tests.builders.graphs.forward_models import parameters_of  # noqa: E402

NETWORKS: dict[str, Callable[[], torch.nn.Module]] = {
    "alexnet": published.alexnet,
    "resnet50": published.resnet50,
    "resnet101": published.resnet101,
    # The auxiliary classifier is left out in models/.
    "inception_v3": lambda: published.inception_v3(aux_logits=False, init_weights=False),
}


def our_shapes(model: onnx.ModelProto) -> Counter[tuple[int, ...]]:
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.graph.value_info}
    return Counter(tuple(sorted(shapes[name])) for name in parameters_of(model))


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_are_torchvisions(name: str) -> None:
    """Shapes are sorted: PyTorch's dense weights are [out, in], those of models/ [in, out]."""
    with torch.device("meta"):
        theirs = Counter(tuple(sorted(p.shape)) for p in NETWORKS[name]().parameters())

    assert our_shapes(build_model(name)) == theirs
