"""Say in the graph where replicas meet, when the batch is read per replica.

    before   main -> dW -> update              after   main -> dW -> Average -> update
             main -> (ids, rows) -> update             main -> (Stack, Stack / N) -> update
             main -> loss                              main -> loss -> Average

A replica's own loss stays an output too, where the user fetches it (Aggregation.replica_outputs).

Under this reading the graph is what one replica runs; the result is the graph run N times, its
gradients averaged, then updated once. Indexed slices are averaged by laying all replicas' slices
one behind the other, rows divided by N; where ids do not differ between replicas, rows alone are
averaged. What else depends on data and outlives the step (running statistics) is averaged too.

Gradients are summed instead where the user asks for it (average_dense, average_sparse in parallax.txt,
section 4): a Sum in the place of an Average, and rows that are not divided.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from partc.passes.graph.reachability import descendants, drop_unread_nodes
from partc.passes.graph.training_graph import Gradient, TrainingGraph
from partc.passes.indexed_rows.indexed_slices import pairs_of
from partc.passes.indexed_rows.separate_rows import RowSeparation
from partc.runtime.errors import UnsupportedModel
from partc.runtime.plan.program import Aggregation

REPLICA_DOMAIN = "partc.replicas"
AVERAGE = "Average"  # x -> the mean of all replicas' x
SUM = "Sum"  # x -> the sum of all replicas' x
STACK = "Stack"  # x [n, ..] -> all replicas' x [N n, ..], divided by N if attribute `divide`


def own_output(name: str) -> str:
    """Return what each replica's own value of an output is called, beside the mean."""
    return f"{name}.replica"


_SUFFIX = {AVERAGE: "average", SUM: "sum", STACK: "stacked"}


def average_replicas(
    training: TrainingGraph,
    main: set[str],
    aggregation: Aggregation = Aggregation(),  # noqa: B008  # frozen
    *,
    is_alone: bool = False,
) -> TrainingGraph:
    """Insert Average, Sum and Stack nodes; `main` are the names of the main computation's nodes.

    `is_alone`: there is one worker, whose integers are their own mean. Raises UnsupportedModel where an
    integer variable would have to be averaged.
    """
    return _Averaging(training, main, aggregation, is_alone).run()


class _Averaging:
    def __init__(
        self, training: TrainingGraph, main: set[str], aggregation: Aggregation, is_alone: bool
    ) -> None:
        self.training = training
        self.is_alone = is_alone
        self.aggregation = aggregation
        self.graph = training.graph
        self.main = main
        self.tensors = self.graph.tensors()
        self.inserted: dict[tuple[str, str], str] = {}  # (op, tensor) -> what its node makes
        self.varying = _descendants(self.graph, set(training.varying_inputs()))

    def run(self) -> TrainingGraph:
        own = self._separated()
        pairs = {name: self._pairs(gradient) for name, gradient in own.items()}
        gradients = {name: self._average_gradient(gradient, pairs[name]) for name, gradient in own.items()}
        # What lies behind an averaged gradient no longer varies.
        self.varying = _descendants(self.graph, set(self.training.varying_inputs()))
        variables = {}
        for name, variable in self.training.variables.items():
            if variable.next in self.varying:
                self._check_float(variable.next)
                variable = replace(variable, next=self._average_output(variable.next))
            variables[name] = variable
        outputs = {self._average_scalar(name): name for name in self.training.outputs}
        if self.aggregation.replica_outputs:
            outputs |= self._own_outputs(outputs)
        self._put_in_order()
        self._forget_shapes()
        return replace(
            self.training,
            gradients=gradients,
            variables=variables,
            outputs=tuple(outputs),
            output_names={tensor: name for tensor, name in outputs.items() if tensor != name},
        )

    def _put_in_order(self) -> None:
        """Move each inserted node behind what it reads; the others keep their order."""
        inserted: dict[str, list[gs.Node]] = {}
        for node in self.graph.nodes:
            if node.domain == REPLICA_DOMAIN:
                inserted.setdefault(node.inputs[0].name, []).append(node)
        produced = {tensor.name for node in self.graph.nodes for tensor in node.outputs}
        ordered = [node for source in sorted(inserted.keys() - produced) for node in inserted[source]]
        for node in self.graph.nodes:
            if node.domain != REPLICA_DOMAIN:
                ordered.append(node)
                ordered += [new for tensor in node.outputs for new in inserted.get(tensor.name, ())]
        assert len(ordered) == len(self.graph.nodes)
        self.graph.nodes = ordered

    def _separated(self) -> dict[str, Gradient]:
        """Return the gradients, none of which has a tensor that another wants to meet otherwise."""
        gradients = self.training.gradients
        averages: dict[str, set[str]] = {}  # tensor -> what is to be inserted behind it
        for gradient in gradients.values():
            for tensor, op in self._averaged_tensors(gradient):
                averages.setdefault(tensor, set()).add(op)
        contested = {tensor for tensor, ops in averages.items() if len(ops) > 1}
        if not contested:
            return gradients
        separation = RowSeparation(self.graph, self.main)
        separated = {
            name: separation.separate(gradient, contested)
            if gradient.is_sparse
            and any(tensor in contested for tensor, _ in self._averaged_tensors(gradient))
            else gradient
            for name, gradient in gradients.items()
        }
        named = (t for g in separated.values() for t in (g.dense, g.ids, g.rows) if t is not None)
        drop_unread_nodes(self.graph, named)
        self.tensors = self.graph.tensors()
        self.varying = _descendants(self.graph, set(self.training.varying_inputs()))
        return separated

    def _averaged_tensors(self, gradient: Gradient) -> list[tuple[str, str]]:
        """Return the tensors of a gradient whose values replicas have of their own, and the ops for them."""
        if not gradient.is_sparse:
            assert gradient.dense is not None
            return [(gradient.dense, AVERAGE if self.aggregation.average_dense else SUM)]
        assert gradient.ids is not None and gradient.rows is not None
        alike = AVERAGE if self.aggregation.average_sparse else SUM
        pairs = pairs_of(self.tensors[gradient.ids], self.tensors[gradient.rows])
        return [(rows, STACK if ids in self.varying else alike) for ids, rows in pairs]

    def _forget_shapes(self) -> None:
        """What lies behind a Stack is N times as long as the graph of one replica says."""
        stacked = [node.outputs[0].name for node in self.graph.nodes if node.op == STACK]
        longer = descendants(self.graph, stacked)
        for node in self.graph.nodes:
            for tensor in node.outputs:
                if tensor.name in longer:
                    tensor.shape = None

    def _pairs(self, gradient: Gradient) -> list[tuple[str, str]]:
        """Return the (ids, rows) that a sparse gradient is joined from; joining is done after meeting."""
        if gradient.ids is None or gradient.rows is None:
            return []
        pairs = pairs_of(self.tensors[gradient.ids], self.tensors[gradient.rows])
        if len(pairs) > 1:
            for joined in (gradient.ids, gradient.rows):
                self.main.discard(self.tensors[joined].inputs[0].name)
        return pairs

    def _average_gradient(self, gradient: Gradient, pairs: list[tuple[str, str]]) -> Gradient:
        if not gradient.is_sparse:
            assert gradient.dense is not None
            average = self._average_tensor(gradient.dense, self.aggregation.average_dense)
            return replace(gradient, dense=average)
        averages = self.aggregation.average_sparse
        for ids, rows in pairs:
            if ids in self.varying:
                self._insert(STACK, ids, divide=0)
                self._insert(STACK, rows, divide=int(averages))
            else:
                self._average_tensor(rows, averages)
        return self._renamed(gradient, len(pairs) == 1)

    def _average_tensor(self, tensor: str, averages: bool) -> str:
        """Average or sum a tensor whose elements mean the same on all replicas; return its new name.

        The mean of what does not vary is itself, its sum is not.
        """
        if averages and tensor not in self.varying:
            return tensor
        return self._insert(AVERAGE if averages else SUM, tensor)

    def _renamed(self, gradient: Gradient, single: bool) -> Gradient:
        if not single:
            return gradient
        assert gradient.ids is not None and gradient.rows is not None

        def joined(tensor: str) -> str:
            names = (self.inserted[op, tensor] for op in _SUFFIX if (op, tensor) in self.inserted)
            return next(names, tensor)

        return replace(gradient, ids=joined(gradient.ids), rows=joined(gradient.rows))

    def _insert(self, op: str, tensor: str, **attributes: int) -> str:
        """Put a node between the tensor and its readers outside the main computation."""
        if (op, tensor) in self.inserted:
            return self.inserted[op, tensor]
        source = self.tensors[tensor]
        name = self._fresh(f"{tensor}.{_SUFFIX[op]}")
        target = gs.Variable(name, dtype=source.dtype, shape=None if op == STACK else source.shape)
        for reader in list(source.outputs):
            if reader.name not in self.main:
                reader.inputs = [target if operand is source else operand for operand in reader.inputs]
        node = gs.Node(op, f"{name}.node", attributes, [source], [target], domain=REPLICA_DOMAIN)
        self.graph.nodes.append(node)
        self.graph.outputs = [target if out is source else out for out in self.graph.outputs]
        self.tensors[name] = target
        self.inserted[op, tensor] = name
        return name

    def _fresh(self, hint: str) -> str:
        name, number = hint, 1
        while name in self.tensors:
            name, number = f"{hint}_{number}", number + 1
        return name

    def _average_output(self, tensor: str) -> str:
        self.main.update(reader.name for reader in self.tensors[tensor].outputs)
        return self._insert(AVERAGE, tensor)

    def _average_scalar(self, output: str) -> str:
        tensor = self.tensors[output]
        is_scalar = tensor.shape is not None and len(tensor.shape) == 0
        if output in self.varying and is_scalar and np.issubdtype(tensor.dtype, np.floating):
            return self._average_output(output)
        return output

    def _own_outputs(self, outputs: Mapping[str, str]) -> dict[str, str]:
        """Return what has been averaged, as outputs of each replica: tensor -> name."""
        own = {name: own_output(name) for tensor, name in outputs.items() if tensor != name}
        if taken := sorted(set(own.values()) & set(self.training.outputs)):
            raise UnsupportedModel(
                f"the graph has an output {taken[0]!r}, as each replica's own value is to be called",
                at=f"output {taken[0]!r}",
                fix="give it another name",
            )
        self.graph.outputs += [self.tensors[tensor] for tensor in own]
        return own

    def _check_float(self, tensor: str) -> None:
        if not self.is_alone and not np.issubdtype(self.tensors[tensor].dtype, np.floating):
            raise UnsupportedModel(
                "an integer variable that depends on each replica's own data cannot be averaged",
                at=f"next value {tensor!r}",
                fix="train it synchronously with --batch global, or keep this variable out of the "
                "training step",
            )


def _descendants(graph: gs.Graph, sources: set[str]) -> set[str]:
    """Tensors that depend on the sources' values, not looking through Average, Sum and Stack."""
    reached = set(sources)
    for node in graph.nodes:
        if (
            node.domain != REPLICA_DOMAIN
            and node.op not in ("Shape", "Size")
            and any(tensor.name in reached for tensor in node.inputs)
        ):
            reached.update(tensor.name for tensor in node.outputs)
    return reached
