"""Columns in place of records: flattened lists, and numbers that are as exact as a page tells them.

Whatever a reader may ask for has one row of numbers, by the user's own names:

0 ...            the nodes of the user's file, in its order
users ...        nodes that partc added
first_variable   variables, then data inputs
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
import onnx_graphsurgeon as gs

from partc.compiler.compilation import Compilation


def flattened(lists: Iterable[Sequence[int]]) -> dict[str, list[int]]:
    """Return lists of numbers as columns: `of` has them one behind the other, `lengths` how many of each."""
    rows = list(map(list, lists))
    return {"of": [number for own in rows for number in own], "lengths": [len(own) for own in rows]}


def shortened(data: Any) -> Any:  # what JSON holds is of any type
    """Shorten numbers: whole ones where they are, else four digits."""
    if isinstance(data, float):
        return int(data) if data.is_integer() else float(f"{data:.4g}")
    if isinstance(data, dict):
        return {key: shortened(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [shortened(value) for value in data]
    return data


@dataclass(frozen=True)
class Names:
    """The numbers, and what the user's file says of its nodes.

    nodes     name of a node -> its number; of the user's file, then of what partc added
    others    name of a variable or a data input -> its number
    tensors   tensor -> the number of what makes it, or is it
    ops       by number: of all nodes
    reads     by number: what all nodes read, as numbers
    in_plan   node -> as it was distributed, for those that were
    replaced  nodes of the file whose results others make in their place
    """

    users: int
    nodes: Mapping[str, int]
    others: Mapping[str, int]
    tensors: Mapping[str, int]
    ops: tuple[str, ...]
    reads: tuple[tuple[int, ...], ...]
    in_plan: Mapping[str, gs.Node]
    replaced: frozenset[str]

    @property
    def any(self) -> Mapping[str, int]:
        """Return the numbers of nodes, variables and inputs together; variables come before nodes."""
        return {**self.nodes, **self.others}


def number_names(compilation: Compilation, model: onnx.ModelProto) -> Names:
    """Return the numbers. `model`: the user's file, in which every node has a name of its own."""
    in_plan = {node.name: node for node in compilation.training.graph.nodes}
    users = {node.name: node for node in model.graph.node}
    names = [*users, *(name for name in in_plan if name not in users)]
    nodes = {name: number for number, name in enumerate(names)}
    plan = compilation.plan
    owned_names = [
        *(variable.name for variable in plan.variables),
        *(entry.name for entry in plan.data_inputs),
    ]
    others = {name: len(names) + number for number, name in enumerate(owned_names)}
    maker_of = {tensor.name: node.name for node in in_plan.values() for tensor in node.outputs if tensor.name}
    tensors = {tensor: nodes[n.name] for n in users.values() for tensor in n.output if tensor}
    replaced = frozenset(
        n.name
        for n in users.values()
        if n.name not in in_plan and any(tensor in maker_of for tensor in n.output)
    )
    tensors |= {tensor: nodes[name] for tensor, name in maker_of.items()} | others
    read = {name: tuple(node.input) for name, node in users.items()}
    read |= {name: tuple(tensor.name for tensor in node.inputs) for name, node in in_plan.items()}
    return Names(
        len(users),
        nodes,
        others,
        tensors,
        tuple(users[name].op_type if name in users else in_plan[name].op for name in names),
        tuple(tuple(dict.fromkeys(tensors[t] for t in read[n] if t in tensors)) for n in names),
        in_plan,
        replaced,
    )
