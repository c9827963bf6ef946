"""The table: op type -> how to write it as other ops. To teach partc a composed op, add it here.

An expansion emits nodes and returns the tensors that stand for the node's outputs, first to last; it
may leave out trailing ones. Ops inside that have no rule either are expanded next.
"""

from collections.abc import Callable, Mapping, Sequence

from partc.compiler.differentiation.expansions import (
    attention,
    fourier,
    grid_sample,
    label_losses,
    normalization_forms,
    recurrent,
    relayout,
)
from partc.compiler.differentiation.forward_node import ForwardNode
from partc.compiler.differentiation.rules.reduction import expand_cum_prod

Expansion = Callable[[ForwardNode], Sequence[str]]

EXPANSIONS: Mapping[str, Expansion] = {
    "AffineGrid": relayout.expand_affine_grid,
    "Attention": attention.expand_attention,
    "Col2Im": relayout.expand_col2im,
    "CumProd": expand_cum_prod,
    "DFT": fourier.expand_dft,
    "DequantizeLinear": relayout.expand_dequantize,
    "GRU": recurrent.GRU,
    "GridSample": grid_sample.expand_grid_sample,
    "GroupNormalization": normalization_forms.expand_group_normalization,
    "InstanceNormalization": normalization_forms.expand_instance_normalization,
    "LSTM": recurrent.LSTM,
    "LpNormalization": normalization_forms.expand_lp_normalization,
    "MaxUnpool": relayout.expand_max_unpool,
    "MeanVarianceNormalization": normalization_forms.expand_mean_variance_normalization,
    "NegativeLogLikelihoodLoss": label_losses.expand_negative_log_likelihood,
    "RMSNormalization": normalization_forms.expand_rms_normalization,
    "RNN": recurrent.RNN,
    "RotaryEmbedding": attention.expand_rotary_embedding,
    "STFT": fourier.expand_stft,
    "SoftmaxCrossEntropyLoss": label_losses.expand_softmax_cross_entropy,
    "TensorScatter": relayout.expand_tensor_scatter,
}
