"""Inception-v3 (Szegedy et al., arXiv:1512.00567, table 1), normalising over the batch as in training.

    stem     five convolutions and two poolings: 299 x 299 to 35 x 35
    35 x 35  three blocks with 1x1, 5x5 and double 3x3 branches      (figure 5)
    17 x 17  four blocks with 1x7 and 7x1 convolutions               (figure 6)
     8 x  8  two blocks whose 3x3 are spread into 1x3 and 3x1        (figure 7)
    head     mean over the image, one dense layer ─> logits [batch, classes]

Between sizes a block strides in all its branches (figure 10). The auxiliary classifier is left out: the
paper of Parallax counts 24 million parameters, which is the network without it (27 with).
"""

from typing import Annotated, Literal

import onnx
from msgspec import Meta

from partc.models.graph_builder import GraphBuilder, ModelOptions, Size
from partc.models.layers import KernelSize, batch_norm, convolve, mean_head

STEM_CHANNELS = 32  # the published network's first layer; `width` scales all others alike

# A branch is a row of convolutions: (kernel, channels, stride).
Layer = tuple[KernelSize, int, int]


class InceptionV3Options(ModelOptions, frozen=True, kw_only=True):
    """Sizes of the model; the defaults are the paper's."""

    # ONNX Runtime has no float64 convolutions.
    dtype: Annotated[Literal["float32"], Meta(description="element type of parameters")] = "float32"
    width: Annotated[Size, Meta(description="channels of the first layer; the others follow")] = STEM_CHANNELS
    image: Annotated[int, Meta(ge=75, description="height and width of an image")] = 299
    classes: Annotated[Size, Meta(description="classes")] = 1000


def inception_v3(options: InceptionV3Options) -> onnx.ModelProto:
    """Build the forward graph: x [batch, 3, image, image] to logits [batch, classes]."""
    net = _Net(GraphBuilder("inception_v3", options), options.width)
    b = net.b
    x = b.input("x", b.element_type, [options.batch_size, 3, options.image, options.image])
    hidden, channels = _stem(net, x)
    for index, pooled in enumerate((32, 64, 64)):
        hidden, channels = _square_block(net, f"square{index}", hidden, channels, pooled)
    hidden, channels = _shrink_to_17(net, hidden, channels)
    for index, middle in enumerate((128, 160, 160, 192)):
        hidden, channels = _row_block(net, f"row{index}", hidden, channels, middle)
    hidden, channels = _shrink_to_8(net, hidden, channels)
    for index in range(2):
        hidden, channels = _spread_block(net, f"spread{index}", hidden, channels)
    mean_head(b, hidden, channels, options.classes)
    b.output("logits", [options.batch_size, options.classes])
    return b.model()


class _Net:
    """A builder, and how wide the network is."""

    def __init__(self, b: GraphBuilder, width: int) -> None:
        self.b = b
        self.width = width

    def channels(self, published: int) -> int:
        return max(1, published * self.width // STEM_CHANNELS)

    def convolve(
        self, name: str, x: str, channels_in: int, kernel: KernelSize, published: int, stride: int = 1,
        *, same: bool = True,
    ) -> tuple[str, int]:  # fmt: skip
        """Convolve, normalise, rectify; `same` keeps the size at stride 1."""
        channels = self.channels(published)
        pads = (kernel[0] // 2, kernel[1] // 2) if same else (0, 0)
        convolved = convolve(self.b, name, x, channels_in, channels, kernel, stride, pads)
        return self.b.op("Relu", batch_norm(self.b, name, convolved, channels)), channels

    def branch(self, name: str, x: str, channels: int, layers: tuple[Layer, ...]) -> tuple[str, int]:
        """Return a row of convolutions; one with a stride keeps no border."""
        for index, (kernel, published, stride) in enumerate(layers):
            x, channels = self.convolve(
                f"{name}.{index}", x, channels, kernel, published, stride, same=stride == 1
            )
        return x, channels

    def join(self, branches: list[tuple[str, int]]) -> tuple[str, int]:
        """Lay branches side by side along the channels."""
        joined = self.b.op("Concat", *(tensor for tensor, _ in branches), axis=1)
        return joined, sum(channels for _, channels in branches)

    def shrink(self, x: str) -> str:
        return self.b.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2])

    def pooled_branch(self, name: str, x: str, channels: int, published: int) -> tuple[str, int]:
        pooled = self.b.op("AveragePool", x, kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)
        return self.convolve(name, pooled, channels, (1, 1), published)


def _stem(net: _Net, x: str) -> tuple[str, int]:
    hidden, channels = net.convolve("stem0", x, 3, (3, 3), 32, 2, same=False)
    hidden, channels = net.convolve("stem1", hidden, channels, (3, 3), 32, same=False)
    hidden, channels = net.convolve("stem2", hidden, channels, (3, 3), 64)
    hidden, channels = net.convolve("stem3", net.shrink(hidden), channels, (1, 1), 80, same=False)
    hidden, channels = net.convolve("stem4", hidden, channels, (3, 3), 192, same=False)
    return net.shrink(hidden), channels


def _square_block(net: _Net, name: str, x: str, channels: int, pooled: int) -> tuple[str, int]:
    return net.join(
        [
            net.branch(f"{name}.one", x, channels, (((1, 1), 64, 1),)),
            net.branch(f"{name}.five", x, channels, (((1, 1), 48, 1), ((5, 5), 64, 1))),
            net.branch(f"{name}.three", x, channels, (((1, 1), 64, 1), ((3, 3), 96, 1), ((3, 3), 96, 1))),
            net.pooled_branch(f"{name}.pool", x, channels, pooled),
        ]
    )


def _shrink_to_17(net: _Net, x: str, channels: int) -> tuple[str, int]:
    double = (((1, 1), 64, 1), ((3, 3), 96, 1), ((3, 3), 96, 2))
    return net.join(
        [
            net.branch("to17.three", x, channels, (((3, 3), 384, 2),)),
            net.branch("to17.double", x, channels, double),
            (net.shrink(x), channels),
        ]
    )


def _row_block(net: _Net, name: str, x: str, channels: int, middle: int) -> tuple[str, int]:
    along, down = (1, 7), (7, 1)
    once = (((1, 1), middle, 1), (along, middle, 1), (down, 192, 1))
    twice = (((1, 1), middle, 1), (down, middle, 1), (along, middle, 1), (down, middle, 1), (along, 192, 1))
    return net.join(
        [
            net.branch(f"{name}.one", x, channels, (((1, 1), 192, 1),)),
            net.branch(f"{name}.once", x, channels, once),
            net.branch(f"{name}.twice", x, channels, twice),
            net.pooled_branch(f"{name}.pool", x, channels, 192),
        ]
    )


def _shrink_to_8(net: _Net, x: str, channels: int) -> tuple[str, int]:
    rows = (((1, 1), 192, 1), ((1, 7), 192, 1), ((7, 1), 192, 1), ((3, 3), 192, 2))
    return net.join(
        [
            net.branch("to8.three", x, channels, (((1, 1), 192, 1), ((3, 3), 320, 2))),
            net.branch("to8.rows", x, channels, rows),
            (net.shrink(x), channels),
        ]
    )


def _spread_block(net: _Net, name: str, x: str, channels: int) -> tuple[str, int]:
    branches = [net.branch(f"{name}.one", x, channels, (((1, 1), 320, 1),))]
    for kind, layers in (
        ("single", (((1, 1), 384, 1),)),
        ("double", (((1, 1), 448, 1), ((3, 3), 384, 1))),
    ):
        middle, width = net.branch(f"{name}.{kind}", x, channels, layers)
        branches += [
            net.convolve(f"{name}.{kind}.along", middle, width, (1, 3), 384),
            net.convolve(f"{name}.{kind}.down", middle, width, (3, 1), 384),
        ]
    branches.append(net.pooled_branch(f"{name}.pool", x, channels, 192))
    return net.join(branches)
