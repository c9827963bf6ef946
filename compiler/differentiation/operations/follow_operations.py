"""Hold nodes against the PyTorch operations that they came from, as metadata of dynamo=True tells.

    operation   _native_batch_norm_legit_functional(x, %scale, %bias, %mean, %var, True, 0.1, 1e-05)
    node        y = BatchNormalization (x, scale, bias, mean, var)      by the statistics of batches before
    becomes     y, mean', var' = BatchNormalization <training_mode = 1, momentum = 0.9> (...)

PyTorch 2.13 writes nodes as they compute in evaluation, whatever the module does in training. Where enough is
left, nodes are written anew; else the file is refused.
"""

import onnx

from partc.compiler.differentiation.forward.expand_ops import names_in
from partc.compiler.differentiation.operations.batch_normalisations import train_normalisations
from partc.compiler.differentiation.operations.draw_dropouts import draw_dropouts
from partc.compiler.differentiation.operations.hold_padding import hold_padding
from partc.compiler.differentiation.operations.refuse_lost import refuse_lost, refuse_lost_buffers
from partc.passes.graph.operation_builder import OperationBuilder


def follow_operations(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with nodes that train as their operations do in PyTorch; else itself.

    Raises UnsupportedModel where the file computes something else than the module, and does not tell enough.
    """
    refuse_lost(model.graph)
    rewritings = train_normalisations(model.graph) | draw_dropouts(model) | hold_padding(model.graph)
    refuse_lost_buffers(model)
    if not rewritings:
        return model
    followed = onnx.ModelProto()
    followed.CopyFrom(model)
    names = OperationBuilder(names_in(followed.graph))
    nodes: list[onnx.NodeProto] = []
    for place, node in enumerate(followed.graph.node):
        nodes += rewritings[place](node, names) if place in rewritings else [node]
    del followed.graph.node[:]
    followed.graph.node.extend(nodes)
    return followed
