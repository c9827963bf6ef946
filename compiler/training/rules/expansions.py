"""The table: op type -> how to write it as other ops. To teach partc a composed op, add it here.

An expansion emits nodes and returns the tensors that stand for the node's outputs, first to last; it
may leave out trailing ones. Ops inside that have no rule either are expanded next.
"""

from collections.abc import Callable, Mapping, Sequence

from partc.compiler.training.rules import attention, grid_sample, label_losses, normalization_forms, recurrent
from partc.compiler.training.rules.forward_node import ForwardNode
from partc.compiler.training.rules.reduction import expand_cum_prod

Expansion = Callable[[ForwardNode], Sequence[str]]

EXPANSIONS: Mapping[str, Expansion] = {
    "Attention": attention.expand_attention,
    "CumProd": expand_cum_prod,
    "GRU": recurrent.GRU,
    "GridSample": grid_sample.expand_grid_sample,
    "GroupNormalization": normalization_forms.expand_group_normalization,
    "InstanceNormalization": normalization_forms.expand_instance_normalization,
    "LSTM": recurrent.LSTM,
    "LpNormalization": normalization_forms.expand_lp_normalization,
    "MeanVarianceNormalization": normalization_forms.expand_mean_variance_normalization,
    "NegativeLogLikelihoodLoss": label_losses.expand_negative_log_likelihood,
    "RMSNormalization": normalization_forms.expand_rms_normalization,
    "RNN": recurrent.RNN,
    "RotaryEmbedding": attention.expand_rotary_embedding,
    "SoftmaxCrossEntropyLoss": label_losses.expand_softmax_cross_entropy,
}
