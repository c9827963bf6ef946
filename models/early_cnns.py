"""AlexNet and LeNet.

    alexnet   five convolutions with biases, three max-poolings, three dense layers ─> logits [batch, classes]
    lenet     two convolutions, each with an average-pooling, three dense layers ───> logits [batch, classes]

AlexNet is the one-tower network of Krizhevsky, arXiv:1404.5997, as PyTorch's collection has it: without local
normalisation, and here without dropout. LeNet-5 is that of LeCun et al., Proc. IEEE 86 (1998), section II.B:
tanh, but every map of the second convolution reads all of the first, pooling has no weights of its own,
and the last layer is dense in place of radial.
"""

from typing import Annotated, Literal

import onnx
from msgspec import Meta

from partc.models.graph_builder import GraphBuilder, ModelOptions, Size
from partc.models.layers import convolve, dense

# Of the published network with 64 channels in its first layer: channels, kernel, stride, pads, pooled after.
ALEXNET_LAYERS = ((64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False),
                  (256, 3, 1, 1, True))  # fmt: skip


class AlexnetOptions(ModelOptions, frozen=True, kw_only=True):
    """Sizes of the model; the defaults are the paper's, and the FlexFlow paper's batch (section 8.1)."""

    # ONNX Runtime has no float64 convolutions.
    dtype: Annotated[Literal["float32"], Meta(description="element type of parameters")] = "float32"
    batch: Annotated[Size | None, Meta(description="samples per step; none leaves it open")] = 256
    width: Annotated[Size, Meta(description="channels of the first layer; the others follow")] = 64
    cells: Annotated[Size, Meta(description="width of the two hidden dense layers")] = 4096
    image: Annotated[int, Meta(ge=63, description="height and width of an image")] = 224
    classes: Annotated[Size, Meta(description="classes")] = 1000


class LenetOptions(ModelOptions, frozen=True, kw_only=True):
    """Sizes of the model; the defaults are the paper's, and the FlexFlow paper's batch."""

    dtype: Annotated[Literal["float32"], Meta(description="element type of parameters")] = "float32"
    batch: Annotated[Size | None, Meta(description="samples per step; none leaves it open")] = 64
    image: Annotated[int, Meta(ge=16, description="height and width of an image")] = 32
    channels: Annotated[Size, Meta(description="channels of an image")] = 1
    classes: Annotated[Size, Meta(description="classes")] = 10


def alexnet(options: AlexnetOptions) -> onnx.ModelProto:
    """Build the forward graph: x [batch, 3, image, image] to logits [batch, classes]."""
    b = GraphBuilder("alexnet", options)
    hidden = b.input("x", b.element_type, [options.batch_size, 3, options.image, options.image])
    channels, size = 3, options.image
    for index, (published, kernel, stride, pad, pooled) in enumerate(ALEXNET_LAYERS):
        following = max(1, published * options.width // ALEXNET_LAYERS[0][0])
        hidden = convolve(
            b, f"layer{index}", hidden, channels, following, (kernel, kernel), stride, (pad, pad), bias=True
        )
        hidden = b.op("Relu", hidden)
        channels, size = following, (size + 2 * pad - kernel) // stride + 1
        if pooled:
            hidden, size = b.op("MaxPool", hidden, kernel_shape=[3, 3], strides=[2, 2]), (size - 3) // 2 + 1
    hidden = b.op("Flatten", hidden, axis=1)
    hidden = b.op("Relu", dense(b, "hidden0", hidden, channels * size * size, options.cells))
    hidden = b.op("Relu", dense(b, "hidden1", hidden, options.cells, options.cells))
    dense(b, "head", hidden, options.cells, options.classes, output="logits")
    b.output("logits", [options.batch_size, options.classes])
    return b.model()


def lenet(options: LenetOptions) -> onnx.ModelProto:
    """Build the forward graph: x [batch, channels, image, image] to logits [batch, classes]."""
    b = GraphBuilder("lenet", options)
    hidden = b.input("x", b.element_type, [options.batch_size, options.channels, *[options.image] * 2])
    channels, size = options.channels, options.image
    for index, following in enumerate((6, 16)):
        hidden = convolve(b, f"layer{index}", hidden, channels, following, (5, 5), 1, (0, 0), bias=True)
        hidden = b.op("AveragePool", b.op("Tanh", hidden), kernel_shape=[2, 2], strides=[2, 2])
        channels, size = following, (size - 4) // 2
    hidden = b.op("Flatten", hidden, axis=1)
    hidden = b.op("Tanh", dense(b, "hidden0", hidden, channels * size * size, 120))
    hidden = b.op("Tanh", dense(b, "hidden1", hidden, 120, 84))
    dense(b, "head", hidden, 84, options.classes, output="logits")
    b.output("logits", [options.batch_size, options.classes])
    return b.model()
