"""What the plan takes for granted: inputs, sizes, and what could not be divided."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from partc.compiler.report.units import count, plural
from partc.cost.sparsity import Sparsity, TouchedRows
from partc.cost.strategy import SyncFacts
from partc.passes.indexed_rows.indexed_slices import FUNCTION_DOMAIN
from partc.passes.lowering.lowered_graph import LoweredGraph, is_communication
from partc.passes.rules.sharding_rules import GRADIENT_RULES, RULES
from partc.runtime.plan.program import Plan
from partc.runtime.plan.variables import DataInput, Normal

TRIVIAL = ("Constant", "Shape", "Size")  # cost nothing worth dividing


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor that the user feeds."""

    name: str
    dtype: str
    shape: str
    samples: str
    values: str


def describe_inputs(plan: Plan) -> tuple[Input, ...]:
    """Return the data inputs in the graph's order."""
    return tuple(
        Input(
            name=item.name,
            dtype=item.dtype,
            shape=" × ".join(str(length) for length in item.shape) or "scalar",
            samples=_samples(item, plan),
            values=f"0 to {count(item.high - 1)}" if item.high is not None else "",
        )
        for item in plan.data_inputs
    )


def _samples(item: DataInput, plan: Plan) -> str:
    if item.sample_axis is None:
        return "none: all replicas read the same values"
    if plan.replicas == 1:
        return f"axis {item.sample_axis}: one replica reads all"
    if plan.batch == "global":
        return f"axis {item.sample_axis}: each replica reads one of {plan.replicas} parts"
    return f"axis {item.sample_axis}: each replica reads its own"


def describe_draws(plan: Plan) -> tuple[str, ...]:
    """Return a sentence per tensor that the runtime draws in every step."""
    return tuple(
        f"{entry.name} ({'normal' if isinstance(entry.distribution, Normal) else 'uniform'}): "
        + (
            "the same for all replicas."
            if entry.sample_axis is None
            else f"each replica draws for its own samples, on axis {entry.sample_axis}."
        )
        for entry in plan.drawn_inputs
    )


def describe_sparsity(sparsity: Sparsity | None, facts: Sequence[SyncFacts]) -> tuple[str, ...]:
    """Return a sentence per sparse parameter, if any was measured: what was measured, what assumed."""
    if sparsity is None:
        return ()
    return tuple(
        measured_sentence(fact.name, sparsity.parameters[fact.name], sparsity)
        if fact.distinct
        else f"{fact.name}: {count(fact.touched_rows)} rows a replica, assumed: its ids do not follow "
        "from the data alone, so all rows are taken to be drawn alike."
        for fact in facts
        if fact.sparse
    )


def measured_sentence(name: str, table: TouchedRows, sparsity: Sparsity) -> str:
    """Say what a step touches of one table."""
    steps = plural(sparsity.steps, "step")
    together = ", ".join(
        f"{count(rows)} by {plural(replicas, 'replica')} together" for replicas, rows in table.distinct[1:]
    )
    rest = f", {together}" if together else ""
    return (
        f"{name}: {count(table.distinct[0][1])} of {count(table.rows)} rows touched by a replica in a "
        f"step{rest}, measured from {sparsity.sample} over {steps}."
    )


def whole_ops(lowered: LoweredGraph) -> tuple[tuple[str, int], ...]:
    """Return the op types that every rank runs whole because no sharding rule divides them."""
    counts: Counter[str] = Counter()
    for node in lowered.nodes:
        if is_communication(node) or node.name not in lowered.original or node.op in TRIVIAL:
            continue
        if node.domain == FUNCTION_DOMAIN or node.op in RULES or node.op.startswith(tuple(GRADIENT_RULES)):
            continue
        layouts = [lowered.meanings[out.name][1] for out in node.outputs if out.name in lowered.meanings]
        if layouts and all(layout.is_whole for layout in layouts):
            counts[node.op] += 1
    return tuple(sorted(counts.items()))
