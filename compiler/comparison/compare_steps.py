"""Compare two steps: what moved between their plans, and why the second takes longer or less long."""

from collections import Counter
from collections.abc import Iterable, Mapping

import onnx

from partc.compiler.comparison.account_step import COLLECTIVES
from partc.compiler.comparison.read_side import Side
from partc.compiler.output.describe_plan import ANNOTATED
from partc.compiler.report.measure_traffic import lane_loads, lane_name
from partc.compiler.report.methods import NAMES
from partc.compiler.report.units import join_words, plural, seconds
from partc.cost.comparison import COMPARISON_FORMAT, Amount, Comparison, Moved
from partc.cost.step_account import Difference, Term, differences_of
from partc.runtime.jobs.results import copies_of, owners_of
from partc.runtime.plan.program import Plan, Start

MOST_NAMED = 3  # terms in a sentence
AS_QUICK = 0.005
KINDS = {"compute": "computing", "core": "waiting for a core in", "transfer": "waiting for"}


def compare_steps(before: Side, after: Side) -> Comparison:
    """Return what differs between two steps."""
    is_same_plan = before.plan.sha256 == after.plan.sha256
    if is_same_plan and after.run is not None and before.run is None:
        differences, reason = after.run.differences, after.run.reason
    else:
        name_of = _in_plan if is_same_plan else _in_any_plan
        differences, reason = differences_of(before.record.account, after.record.account, name_of), ""
    return Comparison(
        COMPARISON_FORMAT,
        before.record,
        after.record,
        reason or explain(before, after, differences),
        differences,
        () if is_same_plan else moved(_variables(before.plan), _variables(after.plan)),
        () if is_same_plan else moved(_operators(before), _operators(after)),
        tuple(_communications(before.plan, after.plan)),
        tuple(_links(before, after)),
    )


def _in_plan(term: Term) -> str:
    return term.name or term.group


def _in_any_plan(term: Term) -> str:
    return term.group


def explain(before: Side, after: Side, differences: Iterable[Difference]) -> str:
    """Return why the second step is quicker or slower: the largest differences, of either sign."""
    total_s = after.record.account.step_s - before.record.account.step_s
    samples = before.record.samples, after.record.samples
    trains = f". A trains {samples[0]} samples a step, B {samples[1]}" if samples[0] != samples[1] else ""
    if abs(total_s) <= AS_QUICK * before.record.account.step_s:
        return f"both take as long{trains}"
    towards = [d for d in differences if d.seconds * total_s > 0 and abs(d.seconds) > abs(total_s) / 20]
    against = [d for d in differences if d.seconds * total_s < 0 and abs(d.seconds) > abs(total_s) / 10]
    words = f"{seconds(abs(total_s))} a step {'more' if total_s > 0 else 'less'}: {_listed(towards)}"
    words += f"; against that {_listed(against)}" if against else ""
    return words + trains


def _listed(differences: list[Difference]) -> str:
    entries = [
        f"{' '.join(filter(None, (KINDS.get(d.kind, ''), d.what)))} {seconds(d.after_s)} instead of "
        f"{seconds(d.before_s)}{f' ({d.link})' if d.link else ''}"
        for d in differences[:MOST_NAMED]
    ]
    more = len(differences) - MOST_NAMED
    return join_words([*entries, f"{more} more"] if more > 0 else entries)


# ---------------------------------------------------------------- what moved


def moved(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Moved, ...]:
    """Return what is otherwise, what moved alike together; most of them first."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys((*before, *after)):
        pair = before.get(name, "not there"), after.get(name, "not there")
        if pair[0] != pair[1]:
            pairs.setdefault(pair, []).append(name)
    return tuple(
        Moved(tuple(names), *pair) for pair, names in sorted(pairs.items(), key=lambda item: -len(item[1]))
    )


def _variables(plan: Plan) -> dict[str, str]:
    """Return how every variable is synchronised, and who has what of it."""
    methods = {variable.name: variable.method for variable in plan.variables}
    return {name: f"{NAMES[methods[name]]}, {_held(owners_of(plan)[name])}" for name in owners_of(plan)}


def _held(owners: tuple[object, ...]) -> str:
    copies = copies_of(owners)  # type: ignore[arg-type]
    ranks = plural(len({owner.rank for same in copies for owner in same}), "rank")
    return f"whole on {ranks}" if len(copies) == 1 else f"in {plural(len(copies), 'part')} on {ranks}"


def _operators(side: Side) -> dict[str, str]:
    """Return where every node of the model runs, and how its results are split: annotated.onnx has it."""
    path = side.folder.path / ANNOTATED
    if not path.exists():
        return {}
    model = onnx.load(path, load_external_data=False)
    devices = len(model.configuration[0].device) if model.configuration else 0
    batch = side.folder.plan.batch
    return {node.name: _placed(node, devices, batch) for node in model.graph.node if node.name}


def _placed(node: onnx.NodeProto, devices: int, batch: str) -> str:
    if not node.device_configurations:
        return _alike(devices, batch)
    configuration = node.device_configurations[0]
    words = [f"stage {configuration.pipeline_stage}"] if configuration.HasField("pipeline_stage") else []
    for spec in configuration.sharding_spec[:1]:
        groups = {entry.key: len(entry.value) for entry in spec.index_to_device_group_map}
        count = sum(groups.get(device, 1) for device in spec.device)
        axes = [
            f"axis {dim.axis} in {max(simple.num_shards for simple in dim.simple_sharding)}"
            for dim in spec.sharded_dim
        ]
        where = f"{join_words(axes)} on {plural(count, 'device')}" if axes else _alike(count, batch)
        words.append(where)
    return ", ".join(words) or _alike(devices, batch)


def _alike(devices: int, batch: str) -> str:
    """Say that so many devices run all of a node: of one batch, or each of its own."""
    where = f"on {plural(devices, 'device')}"
    return f"{where}, each on a batch of its own" if batch == "per-replica" else f"whole {where}"


# ---------------------------------------------------------------- what is sent


def _communications(before: Plan, after: Plan) -> Iterable[Amount]:
    """Yield the communications of each kind, with the bytes that a member supplies."""
    one, other = _payloads(before), _payloads(after)
    for what in dict.fromkeys((*one, *other)):
        a, b = one.get(what, []), other.get(what, [])
        yield Amount(what, sum(a), sum(b), len(a), len(b))


def _payloads(plan: Plan) -> dict[str, list[int]]:
    payloads: dict[str, list[int]] = {}
    for start in plan.instructions:
        if isinstance(start, Start):
            payloads.setdefault(COLLECTIVES[start.kind], []).append(start.payload_bytes)
    return payloads


def _links(before: Side, after: Side) -> Iterable[Amount]:
    """Yield what each link carries in a step where that differs, the largest differences first."""
    one, other = (
        Counter({lane_name(load.lane): load.bytes for load in lane_loads(side.plan, side.cluster)})
        for side in (before, after)
    )
    amounts = [Amount(link, one[link], other[link]) for link in dict.fromkeys((*one, *other))]
    return sorted(amounts, key=lambda amount: -abs(amount.after_bytes - amount.before_bytes))
