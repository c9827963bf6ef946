"""The columns of nodes: where each runs, how it is divided, what it takes.

Along the axis of replicas, some nodes divide samples, and others another dimension of theirs:

    x (samples) ── Conv ──> samples ── ... ── Gemm, out:1 along data ──> columns ── Relu ──> columns

Who divides samples there has its variables whole. So what reads a part of a variable divides something else,
and so does what reads a tensor in parts that such a node makes or reads.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_graphsurgeon as gs

from partc.compiler.compilation import Compilation
from partc.compiler.report.describe_program import op_in_words
from partc.compiler.report.operators.columns import Names, flattened
from partc.compiler.report.operators.describe_split import DividedNode, SplitDescriber
from partc.compiler.report.operators.group_nodes import NodeGroups
from partc.compiler.report.operators.trace_nodes import NodeTrace, PlanTrace
from partc.compiler.report.packed_json import Interned
from partc.compiler.report.units import count
from partc.passes.graph.facts import UNKNOWN
from partc.passes.layouts.decisions import Decision
from partc.passes.layouts.layouts import REPLICAS, Split

NANOSECONDS = 1e9
FOLDED = "worked out when compiling: no device computes it"
REPLACED = "said in other nodes, which partc wrote in its place"
NOWHERE = -1


def node_columns(
    compilation: Compilation,
    names: Names,
    groups: NodeGroups,
    trace: PlanTrace,
    segments: Mapping[str, int],
) -> dict[str, object]:
    """Return the columns, and the lists that their numbers stand for. `segments`: path -> its number."""
    ops, runs, shapes = Interned[str](), Interned[tuple[int, ...]](), Interned[str]()
    splits = Interned[DividedNode | str]()
    describer = SplitDescriber(compilation.plan, compilation.lowered.meshes)
    undivided = nodes_without_samples(
        names.in_plan.values(), compilation.lowered.decisions, compilation.training.variables
    )
    group_of = {name: place for place, group in enumerate(groups.groups) for name in group.nodes}
    traces = [trace.nodes.get(name, NodeTrace()) for name in names.nodes]
    divided = (
        _divided(compilation, names, describer, name, traced, undivided)
        for name, traced in zip(names.nodes, traces, strict=True)
    )
    return {
        "name": list(names.nodes),
        "op": [ops(op_in_words(op)) for op in names.ops],
        "group": [group_of.get(name, NOWHERE) for name in names.nodes],
        "way": [int(groups.ways.get(name, NOWHERE)) for name in names.nodes],
        "of": [names.nodes.get(groups.gradient_of.get(name, ""), NOWHERE) for name in names.nodes],
        "split": [splits(each) for each in divided],
        "runs": [runs(tuple(segments[path] for path in traced.segments)) for traced in traces],
        "time": [round(traced.seconds * NANOSECONDS) for traced in traces],
        "in": [traced.read_bytes for traced in traces],
        "out": [traced.written_bytes for traced in traces],
        "helpers": [traced.helpers for traced in traces],
        "shape": [shapes(_shape(compilation, names, name)) for name in names.nodes],
        "reads": flattened(names.reads),
        "ops": ops.items,
        "runsOf": runs.items,
        "splits": [_split_entry(split) for split in splits.items],
        "shapes": shapes.items,
    }


def _divided(
    compilation: Compilation,
    names: Names,
    describer: SplitDescriber,
    name: str,
    traced: NodeTrace,
    undivided: Collection[str],
) -> DividedNode | str:
    """Return how a node is divided, or why no device computes it. `undivided`: they divide no samples."""
    if not traced.sites:
        return REPLACED if name in names.replaced else FOLDED
    decision = compilation.lowered.decisions.get(name)
    if decision is None or decision.site not in traced.sites:
        return describer.whole_at(traced.sites)
    node = names.in_plan[name]
    rank = len(compilation.shapes.get(node.outputs[0].name, ()))
    updates = name not in compilation.analysis.main
    return describer.describe(decision, node.op, rank, updates=updates, samples=name not in undivided)


def _shape(compilation: Compilation, names: Names, name: str) -> str:
    node = names.in_plan.get(name)
    shape = None if node is None else compilation.shapes.get(node.outputs[0].name)
    if shape is None:
        return ""
    return " × ".join("?" if size == UNKNOWN else count(size) for size in shape) or "one number"


def _split_entry(split: DividedNode | str) -> list[object]:
    """Return the words, rows, columns, how many compute each part, and the ranks as runs."""
    if isinstance(split, str):
        return [split, 0, 0, 0, []]
    return [split.words, split.rows, split.columns, split.together, runs_of(split.ranks)]


def runs_of(numbers: Sequence[int]) -> list[int]:
    """Return numbers as runs: first, step and length of each, one behind the other."""
    runs: list[int] = []
    at = 0
    while at < len(numbers):
        step = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 1
        stop = at + 1
        while stop < len(numbers) and numbers[stop] - numbers[stop - 1] == step:
            stop += 1
        runs += [numbers[at], step, stop - at]
        at = stop
    return runs


def nodes_without_samples(
    nodes: Iterable[gs.Node], decisions: Mapping[str, Decision], variables: Collection[str]
) -> frozenset[str]:
    """Return the names of the nodes, in an order in which they can run, that divide no samples there."""
    names: set[str] = set()
    others: set[tuple[str, Split]] = set()  # tensors and how they are split, where that is of no samples
    for node in nodes:
        decision = decisions.get(node.name)
        if decision is None or not decision.axes or decision.site == "server":
            continue
        along = decision.axes[REPLICAS]
        inputs, outputs = (
            {
                (tensor.name, place)
                for tensor, place in zip(tensors, places, strict=False)
                if type(place) is Split
            }
            for tensors, places in ((node.inputs, along.inputs), (node.outputs, along.outputs))
        )
        if any(name in variables or (name, place) in others for name, place in inputs):
            names.add(node.name)
            others |= inputs | outputs
    return frozenset(names)
