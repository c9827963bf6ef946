"""Compute 3x3 convolutions and their gradients on Winograd's tiles, where that is faster.

before   y = Conv (x, W)                   dW = ConvWeightGrad (x, dy)      dx = ConvDataGrad (dy, W)
after    V = source (x)   U = kernel (W)   y = target (V U')
         D = target' (dy)                  dW = kernel' (D' V)              dx = source' (D U)

source, kernel and target are the linear maps of winograd_tiles, and a prime is the transpose: gradients are
the adjoint of the same computation, so that the three products of a segment share V, U and D. Each factor is
a matrix: V [36, tiles n, c], U [36, o, c], D [36, tiles n, o], so a convolution becomes 36 products of
matrices, with a quarter of the multiplications. Images are turned to [pixels, n c] first, where a tile
gathers whole rows, whatever n is.

Milliseconds of all three, as they are / on tiles (onnxruntime 1.31.1, one thread, AMD EPYC), batch 8:

    64 channels of 56x56   61.7 / 45.0      256 of 14x14   61.3 / 26.5
    128 of 28x28           58.2 / 26.5      512 of 7x7     71.5 / 37.4

Choose how convolutions are computed on a CPU, by what was measured.
"""

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
from onnx import helper, numpy_helper

from partc.passes.cpu_kernels import winograd_tiles as tiles
from partc.passes.cpu_kernels.gather_samples import gather_samples
from partc.passes.cpu_kernels.segment_values import FreshNames, Images, Shape, images_of
from partc.passes.cpu_kernels.winograd_tiles import ENTRIES, KERNEL, OUTPUTS, Tiling

Kind = Literal["Conv", "ConvDataGrad", "ConvWeightGrad"]

# Operations that take the time of one of a large product, from the times above.
OF_TRANSFORM = 1.6
PER_ELEMENT_MOVED = 25
LEAST_GAIN = 1.1  # of the direct computation's time over that on tiles

_GRADIENT = re.compile(r"(Conv(?:Data|Weight)Grad)_3x3s1x1d1x1p(m?\d+)x(m?\d+)x(m?\d+)x(m?\d+)g1(_.*)?")


@dataclass(frozen=True, slots=True)
class _Convolution:
    """One of the three products of a convolution [n, c, ..] -> [n, o, ..]."""

    node: onnx.NodeProto
    kind: Kind
    tiling: Tiling
    samples: float  # of one rank
    channels: tuple[int, int]  # c, o

    @property
    def gain(self) -> float:
        """How many times faster it is on tiles."""
        c, o = self.channels
        count = self.tiling.count * self.samples
        source, target = (self.samples * h * w for h, w in (self.tiling.source, self.tiling.target))
        direct = 2 * KERNEL**2 * target * c * o
        product = 2 * ENTRIES * count * c * o
        transforms = 2 * ENTRIES * (ENTRIES * count * c + OUTPUTS**2 * count * o + KERNEL**2 * c * o)
        moved = 2 * source * c + ENTRIES * count * c + 3 * target * o
        return direct / (product + OF_TRANSFORM * transforms + PER_ELEMENT_MOVED * moved)


def tile_convolutions(model: onnx.ModelProto, images: Images) -> list[str]:
    """Tile convolutions of a segment in place. Return the results that are now computed on tiles."""
    return _Tiling(model.graph, images).run()


class _Tiling:
    def __init__(self, graph: onnx.GraphProto, images: Images) -> None:
        self.graph = graph
        self.images = images
        self.nodes: list[onnx.NodeProto] = []
        self.names = FreshNames(graph)
        self.factors: dict[str, str] = {}  # what they are factors of, and how -> the tensor
        self.constants: dict[tuple[tuple[int, ...], bytes], str] = {}

    def run(self) -> list[str]:
        changed: list[str] = []
        for node in self.graph.node:
            convolution = self._convolution(node) if self.images.may_change(node) else None
            if convolution is None or convolution.gain < LEAST_GAIN:
                self.nodes.append(node)
                continue
            changed.append(node.output[0])
            match convolution.kind:
                case "Conv":
                    self._forward(convolution)
                case "ConvDataGrad":
                    self._data_gradient(convolution)
                case "ConvWeightGrad":
                    self._weight_gradient(convolution)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)
        return changed

    # ------------------------------------------------------------ what may be tiled

    def _convolution(self, node: onnx.NodeProto) -> _Convolution | None:
        """Read a convolution of 3x3 without strides, dilations and groups, if the node is one."""
        if node.op_type == "Conv" and not node.domain:
            return self._read("Conv", node, node.input[0], node.output[0], _padding_before(node))
        match = _GRADIENT.fullmatch(node.op_type)
        if match is None:
            return None
        before = int(match[2].replace("m", "-")), int(match[3].replace("m", "-"))
        if match[1] == "ConvDataGrad":
            return self._read("ConvDataGrad", node, node.output[0], node.input[0], before)
        return self._read("ConvWeightGrad", node, node.input[0], node.input[1], before)

    def _read(
        self, kind: Kind, node: onnx.NodeProto, source: str, target: str, before: tuple[int, int] | None
    ) -> _Convolution | None:
        if before is None or not {source, target} <= self.images.singles:
            return None
        (c, *pixels), (o, *results) = (
            _without_batch(self.images.shapes.get(name)) for name in (source, target)
        )
        kernel = self.images.shapes.get(node.input[1]) if kind == "Conv" else (o, c, KERNEL, KERNEL)
        if len(pixels) != 2 or len(results) != 2 or kernel != (o, c, KERNEL, KERNEL):
            return None
        tiling = Tiling((pixels[0], pixels[1]), (results[0], results[1]), before)
        return _Convolution(node, kind, tiling, self.images.samples(source), (c, o))

    # ------------------------------------------------------------ the three products

    def _forward(self, at: _Convolution) -> None:
        x, weight, *bias = at.node.input
        out = at.node.output[0]
        o = at.channels[1]
        kernels = self._emit(
            "Transpose", [self._kernel_factors(weight, at)], f"{out}/kernels", perm=[0, 2, 1]
        )
        products = self._emit("MatMul", [self._source_factors(x, at), kernels], f"{out}/products")
        results = self._transform(tiles.of_target(), products, f"{out}/results")
        rows = self._reshape(results, [OUTPUTS**2 * at.tiling.count, -1], f"{out}/results/rows")
        image = self._emit("Gather", [rows, self._constant(at.tiling.pieces())], f"{out}/image")
        if bias:
            by_channel = self._reshape(image, [0, -1, o], f"{out}/image/by_channel")
            image = self._emit("Add", [by_channel, bias[0]], f"{out}/image/biased")
            image = self._reshape(image, [at.tiling.target[0] * at.tiling.target[1], -1], f"{out}/image/rows")
        self._channels_first(image, o, at.tiling.target, at.node)

    def _data_gradient(self, at: _Convolution) -> None:
        (dy, weight), out = at.node.input, at.node.output[0]
        factors = [self._target_factors(dy, at), self._kernel_factors(weight, at)]
        products = self._emit("MatMul", factors, f"{out}/products")
        # One entry more, of zeros, for pixels that fewer than four entries read.
        adjoint = np.concatenate([tiles.of_source().T, np.zeros((1, ENTRIES))])
        entries = self._transform(adjoint, products, f"{out}/entries")
        rows = self._reshape(entries, [(ENTRIES + 1) * at.tiling.count, -1], f"{out}/entries/rows")
        parts = [
            self._emit("Gather", [rows, self._constant(readers)], f"{out}/part{index}")
            for index, readers in enumerate(at.tiling.readers())
        ]
        image = self._emit("Sum", parts, f"{out}/image")
        self._channels_first(image, at.channels[0], at.tiling.source, at.node)

    def _weight_gradient(self, at: _Convolution) -> None:
        (x, dy), out = at.node.input, at.node.output[0]
        c, o = at.channels
        transposed = self._emit(
            "Transpose", [self._target_factors(dy, at)], f"{out}/transposed", perm=[0, 2, 1]
        )
        products = self._emit("MatMul", [transposed, self._source_factors(x, at)], f"{out}/products")
        taps = self._transform(tiles.of_kernel().T, products, f"{out}/taps")
        by_tap = self._emit("Transpose", [taps], f"{out}/by_tap", perm=[1, 0])
        self._finish(by_tap, [o, c, KERNEL, KERNEL], at.node)

    # ------------------------------------------------------------ what products share

    def _source_factors(self, image: str, at: _Convolution) -> str:
        """Return V [36, tiles n, c] of an image [n, c, ..]."""
        return self._image_factors(image, "source", at.tiling.reads(), tiles.of_source(), at)

    def _target_factors(self, image: str, at: _Convolution) -> str:
        """Return D [36, tiles n, o] of an image's gradient [n, o, ..]."""
        return self._image_factors(image, "target", at.tiling.outputs(), tiles.of_target().T, at)

    def _image_factors(
        self,
        image: str,
        side: Literal["source", "target"],
        pixels: np.ndarray,
        matrix: np.ndarray,
        at: _Convolution,
    ) -> str:
        padding = "x".join(map(str, (*at.tiling.before, *at.tiling.target)))
        name = f"{image}/{side}{padding}"
        if name in self.factors:
            return self.factors[name]
        sizes, channels = (
            (at.tiling.source, at.channels[0]) if side == "source" else (at.tiling.target, at.channels[1])
        )
        count = sizes[0] * sizes[1]
        rows = self._reshape(image, [-1, count], f"{name}/flat")
        rows = self._emit("Transpose", [rows], f"{name}/pixels", perm=[1, 0])
        if pixels.max() == count:
            rows = self._emit("Pad", [rows, self._constant(np.array([0, 0, 1, 0]))], f"{name}/padded")
        entries = self._emit("Gather", [rows, self._constant(pixels)], f"{name}/entries")
        factors = self._transform(matrix, entries, f"{name}/flat_factors")
        self.factors[name] = self._reshape(factors, [ENTRIES, -1, channels], f"{name}/factors")
        return self.factors[name]

    def _kernel_factors(self, weight: str, at: _Convolution) -> str:
        """Return U [36, o, c] of a weight [o, c, 3, 3]."""
        c, o = at.channels
        name = f"{weight}/tiled"
        if name in self.factors:
            return self.factors[name]
        taps = self._reshape(weight, [o * c, KERNEL**2], f"{name}/taps")
        taps = self._emit("Transpose", [taps], f"{name}/by_tap", perm=[1, 0])
        factors = self._transform(tiles.of_kernel(), taps, f"{name}/flat_factors")
        self.factors[name] = self._reshape(factors, [ENTRIES, o, c], f"{name}/factors")
        return self.factors[name]

    # ------------------------------------------------------------ nodes

    def _transform(self, matrix: np.ndarray, values: str, name: str) -> str:
        """Return the matrix times values [entries, ..], as [rows of the matrix, all else]."""
        operand = self._reshape(values, [matrix.shape[1], -1], f"{name}/operand")
        return self._emit("MatMul", [self._constant(matrix.astype(np.float32)), operand], name)

    def _channels_first(self, rows: str, channels: int, sizes: tuple[int, int], node: onnx.NodeProto) -> None:
        """Turn an image [pixels, n c] back to [n, c, ..], the node's result."""
        transposed = self._emit("Transpose", [rows], f"{node.output[0]}/transposed", perm=[1, 0])
        self._finish(transposed, [-1, channels, *sizes], node)

    def _finish(self, value: str, sizes: Sequence[int], node: onnx.NodeProto) -> None:
        """Emit the last node of those that a node is replaced by: its name, its result."""
        shape = self._constant(np.array(sizes))
        self.nodes.append(helper.make_node("Reshape", [value, shape], [node.output[0]], name=node.name))

    def _reshape(self, value: str, sizes: Sequence[int], name: str) -> str:
        return self._emit("Reshape", [value, self._constant(np.array(sizes))], name)

    def _emit(self, op_type: str, inputs: Sequence[str], name: str, perm: Sequence[int] | None = None) -> str:
        fresh_name = self.names.fresh(name)
        self.nodes.append(helper.make_node(op_type, inputs, [fresh_name], name=fresh_name, perm=perm))
        return fresh_name

    def _constant(self, value: np.ndarray) -> str:
        key = value.shape, value.tobytes()
        if key not in self.constants:
            self.constants[key] = name = self.names.fresh(f"tiles/{len(self.constants)}")
            self.graph.initializer.append(numpy_helper.from_array(value, name))
        return self.constants[key]


def _without_batch(shape: Shape | None) -> tuple[int, ...]:
    """Return an image's sizes but the first; if one is not known, a single 0."""
    sizes = tuple(size for size in (shape or ())[1:] if size is not None)
    return sizes if len(sizes) == len(shape or ()) - 1 else (0,)


def _padding_before(node: onnx.NodeProto) -> tuple[int, int] | None:
    """Return a plain convolution's padding before each axis; None: its windows are other ones."""
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    if attributes.get("auto_pad", b"NOTSET") != b"NOTSET" or attributes.get("group", 1) != 1:
        return None
    if any(size != 1 for name in ("strides", "dilations") for size in attributes.get(name, ())):
        return None
    before = tuple(attributes.get("pads", (0, 0, 0, 0)))[:2]
    return (before[0], before[1]) if len(before) == 2 else None


def choose_bodies(
    model: onnx.ModelProto,
    typed: onnx.ModelProto,
    only: AbstractSet[str] | None = None,
    replicas: int = 1,
) -> list[str]:
    """Give convolutions of a graph the bodies that are fastest; `typed` is the same with shapes inferred.

    Results differ in rounding alone; so one device, which N ranks are compared with, chooses alike.
    `only`: names of nodes that may be changed. `replicas`: ranks that share the graph's batch, and choose for
    their own share. Returns the results that are computed otherwise now.
    """
    images = images_of(typed.graph, only, replicas)
    return [*gather_samples(model, images), *tile_convolutions(model, images)]
