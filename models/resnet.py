"""ResNet-50 and its like (He et al., arXiv:1512.03385, table 1), normalising over the batch as in training.

    stem     7x7 convolution /2, max-pool /2
    stages   3, 4, 6, 3 bottlenecks (ResNet-101: 3, 4, 23, 3): 1x1 down, 3x3, 1x1 up to four times the
             width, plus a shortcut
    head     mean over the image, one dense layer ─> logits [batch, classes]

The original: a stage's first bottleneck strides in its first 1x1 convolution, not in the 3x3.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import onnx
from msgspec import Meta

from partc.models.graph_builder import GraphBuilder, ModelOptions, Size
from partc.models.layers import batch_norm, convolve, mean_head

EXPANSION = 4  # a bottleneck's output is this many times as wide as its 3x3 convolution
Blocks = tuple[Size, Size, Size, Size]


class ResNetOptions(ModelOptions, frozen=True, kw_only=True):
    """Sizes of the model; the defaults are ResNet-50's."""

    # ONNX Runtime has no float64 convolutions.
    dtype: Annotated[Literal["float32"], Meta(description="element type of parameters")] = "float32"
    width: Annotated[Size, Meta(description="channels of the stem and of the first stage")] = 64
    image: Annotated[Size, Meta(description="height and width of an image")] = 224
    classes: Annotated[Size, Meta(description="classes")] = 1000
    blocks: Annotated[Blocks, Meta(description="bottlenecks of the four stages")] = (3, 4, 6, 3)


class ResNet101Options(ResNetOptions, frozen=True, kw_only=True):
    """The defaults are ResNet-101's, and the FlexFlow paper's batch (arXiv:1807.05358, section 8.1)."""

    batch: Annotated[Size | None, Meta(description="samples per step; none leaves it open")] = 64
    blocks: Annotated[Blocks, Meta(description="bottlenecks of the four stages")] = (3, 4, 23, 3)


@dataclass(frozen=True, slots=True)
class _Bottleneck:
    name: str
    channels_in: int
    channels: int
    stride: int
    reshapes: bool  # the shortcut needs a convolution to match

    @property
    def channels_out(self) -> int:
        return EXPANSION * self.channels


def resnet50(options: ResNetOptions) -> onnx.ModelProto:
    """Build the forward graph: x [batch, 3, image, image] to logits [batch, classes]."""
    return _resnet("resnet50", options)


def resnet101(options: ResNetOptions) -> onnx.ModelProto:
    """Build the forward graph: x [batch, 3, image, image] to logits [batch, classes]."""
    return _resnet("resnet101", options)


def _resnet(name: str, options: ResNetOptions) -> onnx.ModelProto:
    b = GraphBuilder(name, options)
    x = b.input("x", b.element_type, [options.batch_size, 3, options.image, options.image])
    hidden = _stem(b, x, options.width)
    for block in _bottlenecks(options):
        hidden = _bottleneck(b, hidden, block)
    mean_head(b, hidden, EXPANSION * 8 * options.width, options.classes)
    b.output("logits", [options.batch_size, options.classes])
    return b.model()


def _bottlenecks(options: ResNetOptions) -> list[_Bottleneck]:
    blocks = []
    channels_in = options.width
    for stage, count in enumerate(options.blocks):
        for position in range(count):
            first = position == 0
            stride = 2 if first and stage > 0 else 1
            channels = options.width << stage
            block = _Bottleneck(f"stage{stage}.{position}", channels_in, channels, stride, first)
            blocks.append(block)
            channels_in = block.channels_out
    return blocks


def _stem(b: GraphBuilder, x: str, width: int) -> str:
    hidden = b.op("Relu", _convolution(b, "stem", x, 3, width, kernel=7, stride=2))
    return b.op("MaxPool", hidden, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])


def _bottleneck(b: GraphBuilder, x: str, block: _Bottleneck) -> str:
    name, stride = block.name, block.stride
    down = _convolution(b, f"{name}.down", x, block.channels_in, block.channels, kernel=1, stride=stride)
    middle = _convolution(
        b, f"{name}.middle", b.op("Relu", down), block.channels, block.channels, kernel=3, stride=1
    )
    up = _convolution(
        b, f"{name}.up", b.op("Relu", middle), block.channels, block.channels_out, kernel=1, stride=1
    )
    shortcut = x
    if block.reshapes:
        shortcut = _convolution(
            b, f"{name}.shortcut", x, block.channels_in, block.channels_out, kernel=1, stride=stride
        )
    return b.op("Relu", b.op("Add", up, shortcut))


def _convolution(
    b: GraphBuilder, name: str, x: str, channels_in: int, channels_out: int, *, kernel: int, stride: int
) -> str:
    """Convolve without a bias and normalise over the batch: [B, in, h, w] to [B, out, h', w']."""
    square, pads = (kernel, kernel), (kernel // 2, kernel // 2)
    convolved = convolve(b, name, x, channels_in, channels_out, square, stride, pads)
    return batch_norm(b, name, convolved, channels_out)
