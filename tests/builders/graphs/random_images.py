"""Random small networks of images: convolutions and poolings of all windows, sums, normalisation.

`exact` ones take integers to integers (or to halves of halves), small enough that float32 holds every sum
exactly whatever its order: ONNX Runtime has no convolution in float64.
"""

from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import numpy_helper

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.parameters.choose_parameters import ParameterChoice
from partc.compiler.differentiation.updates.optimizers import SGD

SAMPLES = 4
HEIGHTS = (8, 12, 16, 24)
ANY_HEIGHTS = tuple(range(5, 18))


def random_image_step(
    seed: int, exact: bool, heights: tuple[int, ...] = HEIGHTS, has_all: bool = False
) -> onnx.ModelProto:
    """Return a training step of a random network on images [SAMPLES, c, height(, width)].

    `has_all`: norms of windows, transposed convolutions and averages that count no padding, too.
    """
    network = _Network(np.random.default_rng(seed), exact, heights, has_all)
    chosen = ParameterChoice(train=("w*",), freeze=("c*",))
    return build_training_graph(network.model(), loss="loss", optimizer=SGD(0.5), parameters=chosen)


@dataclass
class _Network:
    rng: np.random.Generator
    exact: bool
    heights: tuple[int, ...]
    has_all: bool = False
    nodes: list[str] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    count: int = 0

    def model(self) -> onnx.ModelProto:
        rng = self.rng
        space = [int(rng.choice(self.heights)), *([int(rng.integers(4, 9))] if rng.random() < 0.75 else [])]
        source = f"float[{SAMPLES},{3},{','.join(map(str, space))}] x"
        value, channels = self._convolution("x", 3, space)
        blocks = {
            "convolution": self._convolution_behind,
            "pool": self._pool,
            "average": self._average,
            "residual": self._residual,
            **({} if self.exact else {"norm": self._norm, "response": self._response}),
            **(
                {"power": self._power, "transposed": self._transposed, "uncounted": self._uncounted}
                if self.has_all
                else {}
            ),
        }
        for _ in range(int(rng.integers(2, 5))):
            value, channels = blocks[str(rng.choice(list(blocks)))](value, channels, space)
            if rng.random() < 0.6:
                value = self._emit(f"{'Relu' if self.exact else 'Tanh'} ({value})")
        if rng.random() < 0.4:
            value = self._head(value, channels, space)
        weights = self._weight((1, channels, *space), trained=False)
        scores = self._emit(f"Mul ({value}, {weights})")
        self.nodes.append(f"loss = ReduceSum <keepdims = 0> ({scores})")
        return self._parsed(source)

    def _parsed(self, source: str) -> onnx.ModelProto:
        body = "\n".join(self.nodes)
        inputs = ", ".join(
            [source, *(f"float[{','.join(map(str, w.shape))}] {n}" for n, w in self.weights.items())]
        )
        text = f'<ir_version: 10, opset_import: ["": 18]> net ({inputs}) => (float loss) {{ {body} }}'
        model = onnx.parser.parse_model(text)
        del model.graph.input[1:]
        model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in self.weights.items())
        return model

    # ------------------------------------------------------------ blocks

    def _convolution_behind(self, value: str, channels: int, space: list[int]) -> tuple[str, int]:
        return self._convolution(value, channels, space)

    def _convolution(
        self, value: str, channels: int, space: list[int], keeps_size: bool = False
    ) -> tuple[str, int]:
        kernel = [int(self.rng.choice([1, 3, 3, 5, 7])), *(3 for _ in space[1:])]
        strides = [1 if keeps_size else int(self.rng.choice([1, 1, 2])), *(1 for _ in space[1:])]
        dilations = [int(self.rng.choice([1, 1, 2])), *(1 for _ in space[1:])]
        group = 2 if channels % 2 == 0 and self.rng.random() < 0.2 else 1
        result = channels if keeps_size else 4
        windows = self._windows(kernel, strides, dilations, space, keeps_size)
        weight = self._weight((result, channels // group, *kernel))
        bias = f", {self._weight((result,))}" if self.rng.random() < 0.5 else ""
        text = f"Conv <{windows}, group = {group}> ({value}, {weight}{bias})"
        return self._emit(text), result

    def _residual(self, value: str, channels: int, space: list[int]) -> tuple[str, int]:
        inner, _ = self._convolution(value, channels, space, keeps_size=True)
        return self._emit(f"Add ({value}, {inner})"), channels

    def _pool(self, value: str, channels: int, space: list[int]) -> tuple[str, int]:
        size = int(self.rng.choice([2, 3]))
        kernel = [size, *(2 for _ in space[1:])]
        strides = [int(self.rng.choice([1, 2])), *(1 for _ in space[1:])]
        windows = self._windows(kernel, strides, [1 for _ in space], space, most_padding=size - 1)
        return self._emit(f"MaxPool <kernel_shape = {kernel}, {windows}> ({value})"), channels

    def _average(self, value: str, channels: int, space: list[int]) -> tuple[str, int]:
        kernel = [2, *(2 for _ in space[1:])]
        strides = [int(self.rng.choice([1, 2])), *(1 for _ in space[1:])]
        windows = self._windows(kernel, strides, None, space, most_padding=1)
        counts = int(self.exact or self.rng.random() < 0.5)  # a mean of halves, of quarters
        text = f"AveragePool <kernel_shape = {kernel}, {windows}, count_include_pad = {counts}> ({value})"
        return self._emit(text), channels

    def _uncounted(self, value: str, channels: int, space: list[int]) -> tuple[str, int]:
        """Average over what windows have of the image, perhaps with a last window that reaches beyond it."""
        if min(space) < 3:
            return value, channels
        before, after = (int(self.rng.integers(2)) for _ in range(2))
        stride, counts = int(self.rng.choice([1, 2])), int(self.rng.random() < 0.3)
        rank, room = len(space), space[0] + before + after - 2
        last = -(-room // stride) * stride - before  # where a last window begins that reaches beyond
        rounds_up = int(self.rng.random() < 0.4 and last < space[0])
        space[:] = [(room + rounds_up * (stride - 1)) // stride + 1, *(size - 1 for size in space[1:])]
        pads = [before, *[0] * (rank - 1), after, *[0] * (rank - 1)]
        windows = f"strides = {[stride, *[1] * (rank - 1)]}, pads = {pads}, ceil_mode = {rounds_up}"
        kernel = f"kernel_shape = {[2] * rank}"
        text = f"AveragePool <{kernel}, {windows}, count_include_pad = {counts}> ({value})"
        return self._emit(text), channels

    def _power(self, value: str, channels: int, space: list[int]) -> tuple[str, int]:
        kernel = [int(self.rng.choice([2, 3])), *(2 for _ in space[1:])]
        strides = [int(self.rng.choice([1, 2])), *(1 for _ in space[1:])]
        windows = self._windows(kernel, strides, None, space, most_padding=1)
        power = 1 if self.exact else int(self.rng.integers(1, 4))
        return self._emit(f"LpPool <kernel_shape = {kernel}, {windows}, p = {power}> ({value})"), channels

    def _transposed(self, value: str, channels: int, space: list[int]) -> tuple[str, int]:
        """Spread rows by their stride; some may be in no window, and have the bias alone."""
        kernel = [int(self.rng.choice([1, 2, 3, 5])), *(2 for _ in space[1:])]
        stride, dilation = int(self.rng.choice([1, 2, 3])), int(self.rng.choice([1, 1, 2]))
        span = (kernel[0] - 1) * dilation + 1
        more = int(self.rng.integers(stride))
        before, after = (int(self.rng.integers(min(span, 3))) for _ in range(2))
        if (space[0] - 1) * stride + span + more - before - after > 40:
            return self._convolution(value, channels, space)
        space[0] = (space[0] - 1) * stride + span + more - before - after
        space[1:] = [size + 1 for size in space[1:]]
        rest = len(space) - 1
        group = 2 if channels % 2 == 0 and self.rng.random() < 0.2 else 1
        weight = self._weight((channels, 4 // group, *kernel))
        bias = f", {self._weight((4,))}" if self.rng.random() < 0.6 else ""
        pads = [before, *[0] * rest, after, *[0] * rest]
        windows = f"strides = {[stride, *[1] * rest]}, dilations = {[dilation, *[1] * rest]}, pads = {pads}"
        windows += f", output_padding = {[more, *[0] * rest]}, group = {group}"
        return self._emit(f"ConvTranspose <{windows}> ({value}, {weight}{bias})"), 4

    def _norm(self, value: str, channels: int, space: list[int]) -> tuple[str, int]:
        scale, shift = (self._weight((channels,)) for _ in range(2))
        mean, variance = self._constant(np.zeros(channels)), self._constant(np.ones(channels))
        self.count += 1
        name = f"v{self.count}"
        operands = f"{value}, {scale}, {shift}, {mean}, {variance}"
        results = f"{name}, {name}_mean, {name}_variance"
        self.nodes.append(f"{results} = BatchNormalization <training_mode = 1> ({operands})")
        return name, channels

    def _response(self, value: str, channels: int, space: list[int]) -> tuple[str, int]:
        is_flat = len(space) == 2  # others ONNX Runtime does not take
        return self._emit(f"LRN <size = 3> ({value})") if is_flat else value, channels

    def _head(self, value: str, channels: int, space: list[int]) -> str:
        pixels = int(np.prod(space))
        is_exact = pixels & (pixels - 1) == 0
        if self.exact and not is_exact:
            return value
        pool = "GlobalAveragePool" if self.exact or self.rng.random() < 0.7 else "GlobalMaxPool"
        space[:] = [1] * len(space)
        return self._emit(f"{pool} ({value})")

    # ------------------------------------------------------------ parts

    def _windows(
        self,
        kernel: list[int],
        strides: list[int],
        dilations: list[int] | None,
        space: list[int],
        keeps_size: bool = False,
        most_padding: int = 99,
    ) -> str:
        """Lay windows on an image, mostly such that rows divide; `space` becomes the result's."""
        before, after = [], []
        known = dilations or [1] * len(kernel)
        for axis, (k, s, d) in enumerate(zip(kernel, strides, known, strict=True)):
            padding = max(0, (k - 1) * d + 1 - s)
            is_valid = not keeps_size and self.rng.random() < 0.1 and space[axis] > (k - 1) * d + 2
            padding = 0 if is_valid else padding
            first = int(self.rng.integers(padding + 1)) if self.rng.random() < 0.4 else padding // 2
            first = min(first, most_padding)
            last = max(min(padding - first, most_padding), (k - 1) * d + 1 - space[axis] - first)
            before.append(first)
            after.append(last)
            space[axis] = (space[axis] + first + last - (k - 1) * d - 1) // s + 1
        laid = f"strides = {strides}, pads = {[*before, *after]}"
        return laid if dilations is None else f"{laid}, dilations = {dilations}"

    def _weight(self, shape: tuple[int, ...], trained: bool = True) -> str:
        if self.exact:
            values = self.rng.integers(-1, 2, shape)
        else:
            values = self.rng.normal(scale=1 / np.sqrt(max(1, np.prod(shape[1:]))), size=shape)
        return self._constant(np.asarray(values), "w" if trained else "c")

    def _constant(self, values: np.ndarray, letter: str = "c") -> str:
        name = f"{letter}{len(self.weights)}"
        self.weights[name] = values.astype(np.float32)
        return name

    def _emit(self, text: str) -> str:
        self.count += 1
        self.nodes.append(f"v{self.count} = {text}")
        return f"v{self.count}"
