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

from partc.passes.graph.facts import Facts
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.decide_on_servers import slices_rows

LIGHT_OPS = frozenset(["Cast", "Slice", "Gather"])


@dataclass(frozen=True, slots=True)
class BoundaryOps:
    """Nodes that servers may run for one parameter, and what is left of its bytes if they do."""

    nodes: tuple[str, ...] = ()
    share: float = 1.0


def find_boundary_ops(training: TrainingGraph, facts: Facts, main: frozenset[str]) -> dict[str, BoundaryOps]:
    """Return the light ops behind every parameter that make what workers fetch smaller."""
    tensors = training.graph.tensors()
    results = {*training.outputs, *(variable.next for variable in training.variables.values())}
    search = _Search(facts, main, frozenset(results))
    return {parameter: search.behind(tensors[parameter]) for parameter in training.gradients}


@dataclass(frozen=True, slots=True)
class _Search:
    facts: Facts
    main: frozenset[str]
    results: frozenset[str]  # tensors that the step returns

    def behind(self, parameter: gs.Tensor) -> BoundaryOps:
        readers = [node for node in parameter.outputs if node.name in self.main]
        gathers = [node for node in readers if node.op == "Gather" and node.attrs.get("axis", 0) == 0]
        sources = [(parameter, 0)]
        if gathers and len(gathers) == len(readers):
            sources = [(node.outputs[0], len(self.facts.shape(node.inputs[1].name))) for node in gathers]
        chains = [self._chain(source, folded) for source, folded in sources]
        whole = sum(self.facts.nbytes(source.name) for source, _ in sources)
        nodes = tuple(node for chain, _ in chains for node in chain)
        left = sum(nbytes for _, nbytes in chains)
        return BoundaryOps(nodes, left / whole) if nodes and whole else BoundaryOps()

    def _chain(self, source: gs.Tensor, folded: int) -> tuple[tuple[str, ...], int]:
        """Follow single readers; return the nodes up to the smallest result, and its bytes.

        `folded`: leading axes that hold ids, which are one axis on the servers. 0: the parameter itself.
        """
        best: tuple[tuple[str, ...], int] = ((), self.facts.nbytes(source.name))
        nodes: tuple[str, ...] = ()
        tensor = source
        while tensor.name not in self.results:
            readers = [node for node in tensor.outputs if node.name in self.main]
            has_others = tensor is not source and len(readers) != len(tensor.outputs)
            if len(readers) != 1 or has_others or not _is_light(readers[0], tensor, self.facts, folded):
                break
            nodes += (readers[0].name,)
            tensor = readers[0].outputs[0]
            if self.facts.nbytes(tensor.name) < best[1]:
                best = nodes, self.facts.nbytes(tensor.name)
        return best


def _is_light(node: gs.Node, tensor: gs.Tensor, facts: Facts, folded: int) -> bool:
    """Tell whether a node can run on some of the rows, knowing nothing of the others."""
    if node.op not in LIGHT_OPS or node.inputs[0] is not tensor:
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
