"""Whether a step's gradients are the slope of its loss, measured at one point.

    loss (W + e g) - loss (W - e g)   =   2 e |g|^2        if g is the gradient of the loss

A graph with a batch of fixed size may hold 1 / size as a constant: then the structure shows a sum over
samples where a mean is meant. If the loss is a mean over samples and the gradients are its slope, they are a
mean as well. Were they the slope of the sum, they would be larger by the batch's size, at least twice.

Squares are halved by habit, and often in the loss alone, or in the gradient alone: then the gradients are
twice the slope, or half of it. Where the batch is large enough, a sum is still told from that.
"""

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime as ort

from partc.compiler.model_files.open_model import FATAL, open_model
from partc.passes.graph.reachability import ancestors
from partc.passes.graph.training_graph import IR_VERSION, TrainingGraph
from partc.passes.roles.find_roles import gradient_tensors

Arrays = dict[str, np.ndarray]
MAX_ELEMENTS = 30_000_000  # of all variables: larger models are not run while compiling
STEP = 1e-3  # as a part of the variables' norm
TOLERANCE = 0.25
HALVED = (0.5, 2.0)  # slope by gradient, where one of the two is of half the squares
LEAST_SAMPLES = 8  # of a sum, slope by gradient is 2 / samples at most: further from a half than TOLERANCE
_STATE = ort.capi.onnxruntime_pybind11_state
# What onnxruntime raises where a graph does not fit its numbers.
REFUSALS: tuple[type[Exception], ...] = (
    _STATE.Fail,
    _STATE.InvalidArgument,
    _STATE.InvalidGraph,
    _STATE.NotImplemented,
    _STATE.RuntimeException,
)


def is_slope_of_loss(training: TrainingGraph, samples: int = 1) -> bool:
    """Tell whether the gradients are the loss's slope; False where that cannot be measured.

    `samples` of the batch: of LEAST_SAMPLES or more, half the slope and twice the slope pass too. Needs:
    gradients and the loss are known, and all sizes are fixed.
    """
    slope = _slope_by_gradient(training)
    allowed = (1.0, *HALVED) if samples >= LEAST_SAMPLES else (1.0,)
    return any(abs(slope / ratio - 1) < TOLERANCE for ratio in allowed)


def _slope_by_gradient(training: TrainingGraph) -> float:
    """Return the loss's slope along the gradients by what they say it is; not finite where it is unknown."""
    elements = sum(int(np.prod(v.shape, dtype=np.int64)) for v in training.variables.values())
    if training.loss is None or elements > MAX_ELEMENTS:
        return np.nan
    feeds = _draw(training)
    try:
        session = _session(training)
        first = _run(session, feeds)
        gradient = {name: _dense(training, name, first, feeds) for name in training.gradients}
        size = _norm({name: feeds[name] for name in gradient}) * STEP / max(_norm(gradient), 1e-30)
        ahead, behind = (
            _run(
                session,
                feeds | {name: _displace(feeds[name], sign * size * g) for name, g in gradient.items()},
            )
            for sign in (1, -1)
        )
    except REFUSALS:
        return np.nan  # numbers drawn at random may be none that the graph takes
    rise = float(np.sum(ahead[training.loss]) - np.sum(behind[training.loss]))
    expected = 2 * size * _norm(gradient) ** 2
    return rise / expected if expected > 0 else np.nan


def _session(training: TrainingGraph) -> ort.InferenceSession:
    output_names = [
        training.loss or "",
        *(t for g in training.gradients.values() for t in gradient_tensors(g)),
    ]
    graph, tensors = training.graph, training.graph.tensors()
    needed_names = ancestors(graph, output_names)
    nodes = [node for node in graph.nodes if any(t.name in needed_names for t in node.outputs)]
    inputs = [tensor for tensor in graph.inputs if tensor.name in needed_names]
    node_outputs = {t.name for node in nodes for t in node.outputs}
    outputs = [tensors[name] for name in dict.fromkeys(output_names) if name in node_outputs]
    part = gs.Graph(nodes, inputs, outputs, opset=graph.opset, import_domains=graph.import_domains)
    model: onnx.ModelProto = gs.export_onnx(part, do_type_check=False)
    model.ir_version = IR_VERSION
    del model.functions[:]
    model.functions.extend(training.functions)
    return open_model(model, severity=FATAL)


def _run(session: ort.InferenceSession, feeds: Mapping[str, np.ndarray]) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    inputs = {info.name: feeds[info.name] for info in session.get_inputs()}
    return dict(zip(names, session.run(names, inputs), strict=True))


def _draw(training: TrainingGraph) -> Arrays:
    """Draw inputs at random: small positive numbers serve as weights and as variances."""
    rng = np.random.default_rng(0)
    feeds: Arrays = {}
    for name, variable in training.variables.items():
        feeds[name] = _numbers(rng, variable.shape, np.dtype(variable.dtype), 0.02, 0.3)
    for name, data in training.data_inputs.items():
        shape, dtype = [size for size in data.shape if isinstance(size, int)], np.dtype(data.dtype)
        if dtype.kind in "iu":
            feeds[name] = rng.integers(0, data.high or 2, shape).astype(dtype)
        else:
            feeds[name] = _numbers(rng, shape, dtype, -1.0, 1.0)
    for name, entry in training.drawn_inputs.items():
        shape = [size for size in entry.shape if isinstance(size, int)]
        feeds[name] = _numbers(rng, shape, np.dtype(entry.dtype), 0.0, 1.0)
    return feeds


def _numbers(
    rng: np.random.Generator, shape: "tuple[int, ...] | list[int]", dtype: np.dtype, low: float, high: float
) -> np.ndarray:
    return np.asarray(rng.uniform(low, high, shape)).astype(dtype)


def _dense(
    training: TrainingGraph, name: str, results: Mapping[str, np.ndarray], feeds: Arrays
) -> np.ndarray:
    tensors = {**feeds, **results}
    gradient = training.gradients[name]
    if gradient.ids is None or gradient.rows is None:
        return np.asarray(tensors[gradient.dense or ""], np.float64)
    dense = np.zeros(training.variables[name].shape)
    np.add.at(dense, tensors[gradient.ids].reshape(-1), tensors[gradient.rows].reshape(-1, *dense.shape[1:]))
    return dense


def _displace(value: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.asarray(value + by, dtype=value.dtype)


def _norm(arrays: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in arrays.values())))
