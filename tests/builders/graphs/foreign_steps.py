"""Training steps as ONNX text, as somebody else might have written them. No gradient is recorded."""

import onnx

from partc.compiler.importing.import_training import read_training_graph
from partc.compiler.options import GraphOptions
from partc.passes.graph.training_graph import TrainingGraph

# A linear layer and the loss, then its gradient dW; what follows is the update.
FORWARD = """
    y = MatMul (x, W)
    d = Sub (y, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
"""
LINEAR = f"""{FORWARD}
    xt = Transpose <perm = [1, 0]> (x)
    dy = Mul (d, scale)
    dW = MatMul (xt, dy)
"""
LINEAR_HEAD = "float[8,4] x, float[8,3] t, float[4,3] W"
LINEAR_CONSTANTS = "float scale = {0.0833333}, float lr = {0.1}"

SGD = f"""
step ({LINEAR_HEAD}) => (float loss, float[4,3] W_next) <{LINEAR_CONSTANTS}> {{ {LINEAR}
    part = Mul (dW, lr)
    W_next = Sub (W, part)
}}
"""

# A step along the product of two sums over the samples, which is no gradient.
SQUARED = SGD.replace(
    "part = Mul (dW, lr)", "dW1 = MatMul (xt, d)\n both = Mul (dW, dW1)\n part = Mul (both, lr)"
)

# Weight decay and Adam's two slots; the gradient arrives through a Transpose.
ADAM = f"""
step ({LINEAR_HEAD}, float[4,3] m, float[4,3] v, int64 count)
    => (float loss, float[4,3] W_next, float[4,3] m_next, float[4,3] v_next, int64 count_next)
<{LINEAR_CONSTANTS}, float a = {{0.9}}, float b = {{0.99}}, float ra = {{0.1}}, float rb = {{0.01}},
 float eps = {{1e-8}}, int64 one = {{1}}> {{ {FORWARD}
    dt = Transpose <perm = [1, 0]> (d)
    summed = MatMul (dt, x)
    dW = Transpose <perm = [1, 0]> (summed)
    decay = Mul (W, eps)
    g = Add (dW, decay)
    m_kept = Mul (a, m)
    m_added = Mul (ra, g)
    m_next = Add (m_kept, m_added)
    g2 = Mul (g, g)
    v_kept = Mul (b, v)
    v_added = Mul (rb, g2)
    v_next = Add (v_kept, v_added)
    root = Sqrt (v_next)
    safe = Add (root, eps)
    ratio = Div (m_next, safe)
    part = Mul (lr, ratio)
    W_next = Sub (W, part)
    count_next = Add (count, one)
}}
"""

# Adafactor: rows and columns of the clipped gradient's squares, whose product is the second moment.
ADAFACTOR = f"""
step ({LINEAR_HEAD}, float[4] rows, float[3] columns)
    => (float loss, float[4,3] W_next, float[4] rows_next, float[3] columns_next)
<{LINEAR_CONSTANTS}, float kept = {{0.9}}, float new = {{0.1}}, float eps = {{1e-3}},
 float limit = {{0.05}}, float lowest = {{-0.05}}, int64[1] zero = {{0}}, int64[1] one = {{1}}> {{ {LINEAR}
    lower = Min (dW, limit)
    g = Max (lower, lowest)
    g_squared = Mul (g, g)
    g2 = Add (g_squared, eps)
    of_rows = ReduceMean <keepdims = 0> (g2, one)
    rows_kept = Mul (rows, kept)
    rows_new = Mul (of_rows, new)
    rows_next = Add (rows_kept, rows_new)
    of_columns = ReduceMean <keepdims = 0> (g2, zero)
    columns_kept = Mul (columns, kept)
    columns_new = Mul (of_columns, new)
    columns_next = Add (columns_kept, columns_new)
    down = Unsqueeze (rows_next, one)
    across = Unsqueeze (columns_next, zero)
    product = Mul (down, across)
    mean = ReduceMean <keepdims = 0> (rows_next, zero)
    moment = Div (product, mean)
    root = Sqrt (moment)
    ratio = Div (g, root)
    part = Mul (ratio, lr)
    W_next = Sub (W, part)
}}
"""

# Two parameters clipped by their global norm, a moving average of data, and a state carried on.
CLIPPED = """
step (float[8,4] x, float[8,3] t, float[4,3] W, float[3] bias, float[4] mean, float[8,3] state)
    => (float loss, float[4,3] W_next, float[3] bias_next, float[4] mean_next, float[8,3] state_next)
<float lr = {0.1}, float limit = {1.0}, float kept = {0.9}, float new = {0.1}, int64[1] zero = {0}> {
    h = MatMul (x, W)
    b = Add (h, bias)
    mixed = Add (b, state)
    state_next = Tanh (mixed)
    d = Sub (state_next, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    xt = Transpose <perm = [1, 0]> (x)
    dW = MatMul (xt, d)
    db = ReduceSum <keepdims = 0> (d, zero)
    dW2 = ReduceSumSquare <keepdims = 0> (dW)
    db2 = ReduceSumSquare <keepdims = 0> (db)
    total = Add (dW2, db2)
    norm = Sqrt (total)
    larger = Max (norm, limit)
    shrink = Div (limit, larger)
    cW = Mul (dW, shrink)
    cb = Mul (db, shrink)
    sW = Mul (cW, lr)
    sb = Mul (cb, lr)
    W_next = Sub (W, sW)
    bias_next = Sub (bias, sb)
    batch_mean = ReduceMean <keepdims = 0> (x, zero)
    mean_kept = Mul (mean, kept)
    mean_new = Mul (batch_mean, new)
    mean_next = Add (mean_kept, mean_new)
}
"""

# The sum over samples is divided by a label count only afterwards.
COUNTED = """
step (float[8,4] x, float[8,3] t, float[8,1] mask, float[4,3] W) => (float loss, float[4,3] W_next)
<float lr = {0.1}> {
    y = MatMul (x, W)
    d0 = Sub (y, t)
    d = Mul (d0, mask)
    sq = Mul (d, d)
    sum = ReduceSum <keepdims = 0> (sq)
    count = ReduceSum <keepdims = 0> (mask)
    loss = Div (sum, count)
    xt = Transpose <perm = [1, 0]> (x)
    raw = MatMul (xt, d)
    dW = Div (raw, count)
    part = Mul (dW, lr)
    W_next = Sub (W, part)
}
"""

# A table read twice; one gradient is scattered element by element, the other by rows.
TABLE = """
step (int64[6] ids, int64[2,3] more, float[6,4] t, float[10,4] E) => (float loss, float[10,4] E_next)
<float lr = {0.1}, int64[1] last = {-1}, int64[2] wide = {6, 4}, int64[2] size = {10, 4}> {
    e1 = Gather (E, ids)
    e2_grid = Gather (E, more)
    e2 = Reshape (e2_grid, wide)
    e = Add (e1, e2)
    d = Sub (e, t)
    sq = Mul (d, d)
    loss = ReduceMean <keepdims = 0> (sq)
    zeros = ConstantOfShape (size)
    column = Unsqueeze (ids, last)
    grid = Expand (column, wide)
    s1 = ScatterElements <axis = 0, reduction = "add"> (zeros, grid, d)
    positions = Unsqueeze (more, last)
    grid_shape = Shape (e2_grid)
    d_grid = Reshape (d, grid_shape)
    s2 = ScatterND <reduction = "add"> (zeros, positions, d_grid)
    dE = Add (s1, s2)
    part = Mul (dE, lr)
    E_next = Sub (E, part)
}
"""


def parse(text: str, opset: int = 21) -> onnx.ModelProto:
    """Return the model of a graph in ONNX text."""
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {text}')


def with_zeros(model: onnx.ModelProto, *variables: str) -> onnx.ModelProto:
    """Give the named inputs zeros as initial values."""
    for info in model.graph.input:
        if info.name in variables:
            dims = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
            count = 1
            for dim in dims:
                count *= dim
            kind = info.type.tensor_type.elem_type
            model.graph.initializer.append(onnx.helper.make_tensor(info.name, kind, dims, [0] * count))
    return model


def import_step(text: str, **options: object) -> TrainingGraph:
    """Import a step whose variables are the inputs X that have an output X_next."""
    model = parse(text)
    outputs = {info.name for info in model.graph.output}
    state = {i.name: f"{i.name}_next" for i in model.graph.input if f"{i.name}_next" in outputs}
    return read_training_graph(with_zeros(model, *state), GraphOptions(state=state, **options))  # type: ignore[arg-type]
