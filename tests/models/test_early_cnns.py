import numpy as np
import onnx
import pytest

from partc.models.early_cnns import AlexnetOptions, LenetOptions, alexnet, lenet
from tests.builders.graphs.forward_models import parameter_sizes, run_with_parameters


def shapes_of(model: onnx.ModelProto, op_type: str) -> list[list[int]]:
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.graph.value_info}
    return [shapes[node.output[0]] for node in model.graph.node if node.op_type == op_type]


def test_lenet_has_the_papers_layers() -> None:
    """LeCun et al. 1998, section II.B, but for C3 (2,416 where the paper connects only some maps: 1,516),
    the subsampling's own weights, and the last layer's biases."""
    model = lenet(LenetOptions())

    sizes = parameter_sizes(model)

    assert sum(sizes.values()) == 156 + 2_416 + 48_120 + 10_164 + 850
    assert shapes_of(model, "AveragePool") == [[64, 6, 14, 14], [64, 16, 5, 5]]


def test_alexnet_has_the_papers_layers() -> None:
    """Krizhevsky, arXiv:1404.5997, section 5 as in PyTorch's collection: 61,100,840 parameters."""
    model = alexnet(AlexnetOptions())

    sizes = parameter_sizes(model)

    assert sum(sizes.values()) == 61_100_840
    assert shapes_of(model, "MaxPool") == [[256, 64, 27, 27], [256, 192, 13, 13], [256, 256, 6, 6]]


@pytest.mark.parametrize("image", [63, 69, 97, 224])
def test_alexnet_takes_images_of_any_size(image: int) -> None:
    model = alexnet(AlexnetOptions(width=2, cells=3, classes=5, image=image))

    logits, _ = run_with_parameters(model, "logits", {"x": np.ones((256, 3, image, image), np.float32)})

    assert logits.shape == (256, 5) and np.isfinite(logits).all()


@pytest.mark.parametrize("image", [16, 17, 28])
def test_lenet_takes_images_of_any_size(image: int) -> None:
    model = lenet(LenetOptions(image=image, channels=2, batch=3))

    logits, _ = run_with_parameters(model, "logits", {"x": np.ones((3, 2, image, image), np.float32)})

    assert logits.shape == (3, 10)
