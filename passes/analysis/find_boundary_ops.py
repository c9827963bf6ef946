"""Find light ops between what servers own and the main computation, which servers may run instead.

    worker runs it   W [100, 64] ══ 25,600 bytes ══> Slice ── [10, 64] ──> MatMul
    server runs it   W [100, 64] ── Slice ══ 2,560 bytes ══> [10, 64] ──> MatMul

A row that was gathered may be cut (Slice, Gather of columns) or rounded (Cast) before it is sent; a
variable that is read whole likewise. Of a chain of such ops the servers run those up to where the
result is smallest, if that is smaller than what they own. Servers have CPUs alone, so nothing heavier
moves (parallax.txt, section 5.3.2 and figure 10).
"""

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.analysis.facts import Facts
from partc.passes.sharding.decide_layouts import slices_rows
from partc.passes.training_graph import TrainingGraph

LIGHT = frozenset(["Cast", "Slice", "Gather"])


@dataclass(frozen=True, slots=True)
class BoundaryOps:
    """Nodes that servers may run for one parameter, and what is left of its bytes if they do."""

    nodes: tuple[str, ...] = ()
    share: float = 1.0


def find_boundary_ops(
    training: TrainingGraph, facts: Facts, main: frozenset[str], parameter: str
) -> BoundaryOps:
    """Return the light ops behind a parameter that make what workers fetch smaller."""
    readers = [node for node in _readers(training, parameter) if node.name in main]
    gathers = [node for node in readers if node.op == "Gather" and node.attrs.get("axis", 0) == 0]
    if gathers and len(gathers) == len(readers):
        chains = [
            _chain(training, facts, main, node.outputs[0], _rank_of_ids(facts, node)) for node in gathers
        ]
        whole = sum(facts.nbytes(node.outputs[0].name) for node in gathers)
    else:
        chains = [_chain(training, facts, main, training.graph.tensors()[parameter], 0)]
        whole = facts.nbytes(parameter)
    nodes = tuple(node for chain, _ in chains for node in chain)
    left = sum(nbytes for _, nbytes in chains)
    return BoundaryOps(nodes, left / whole) if nodes and whole else BoundaryOps()


def _readers(training: TrainingGraph, tensor: str) -> list[gs.Node]:
    return list(training.graph.tensors()[tensor].outputs)


def _rank_of_ids(facts: Facts, gather: gs.Node) -> int:
    return len(facts.shape(gather.inputs[1].name))


def _chain(
    training: TrainingGraph, facts: Facts, main: frozenset[str], source: gs.Tensor, folded: int
) -> tuple[tuple[str, ...], int]:
    """Follow single readers; return the nodes up to the smallest result, and its bytes.

    `folded`: leading axes that hold ids, which are one axis on the servers. 0: the parameter itself.
    """
    kept = {*training.outputs, *(variable.next for variable in training.variables.values())}
    best: tuple[tuple[str, ...], int] = ((), facts.nbytes(source.name))
    nodes: tuple[str, ...] = ()
    tensor = source
    while tensor.name not in kept:
        readers = [node for node in tensor.outputs if node.name in main]
        has_others = tensor is not source and len(readers) != len(tensor.outputs)
        if len(readers) != 1 or has_others or not _is_light(readers[0], tensor, facts, folded):
            break
        nodes += (readers[0].name,)
        tensor = readers[0].outputs[0]
        if facts.nbytes(tensor.name) < best[1]:
            best = nodes, facts.nbytes(tensor.name)
    return best


def _is_light(node: gs.Node, tensor: gs.Tensor, facts: Facts, folded: int) -> bool:
    """Tell whether a node can run on some of the rows, knowing nothing of the others."""
    if node.op not in LIGHT or node.inputs[0] is not tensor:
        return False
    if any(operand.name and facts.fixed_value(operand.name) is None for operand in node.inputs[1:]):
        return False
    if node.op == "Cast":
        return True
    if not folded and slices_rows(node, facts):
        return True
    rank = len(facts.shape(tensor.name))
    return all(axis % rank >= max(folded, 1) for axis in _axes(node, facts))


def _axes(node: gs.Node, facts: Facts) -> list[int]:
    if node.op == "Gather":
        return [int(node.attrs.get("axis", 0))]
    spelled = facts.fixed_value(node.inputs[3].name) if len(node.inputs) > 3 else None
    if spelled is not None:
        return [int(axis) for axis in np.ravel(spelled)]
    return list(range(facts.shape(node.inputs[1].name)[0]))
