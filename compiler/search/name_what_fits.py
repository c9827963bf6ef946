"""Name a strategy that fits, where replicas that keep every variable whole do not."""

from collections.abc import Iterator
from dataclasses import replace

from partc.compiler.compilation import Compilation
from partc.compiler.options import Options
from partc.compiler.pipeline import DECIDE, LOWERING, OUTLINE, run
from partc.cost.cluster.cluster import Cluster, ranks_of
from partc.cost.named_strategy import NamedStrategy, parse_named
from partc.cost.strategy import Strategy
from partc.passes.graph.training_graph import TrainingGraph
from partc.runtime.errors import DoesNotFit, InputError
from partc.runtime.log import log

MICROBATCHES = (2, 4, 8)  # that are tried, alone and in products


def may_share_variables(options: Options) -> bool:
    """Tell whether another strategy could keep less on a device: this one has no mesh, or replicas alone."""
    strategy = options.chosen_strategy()
    if options.asynchronous:
        return False
    if isinstance(strategy, NamedStrategy):
        return not strategy.shards_variables and strategy.sizes.keys() <= {"data"}
    return not (isinstance(strategy, Strategy) and strategy.has_meshes)


def name_what_fits(
    refusal: DoesNotFit, graphs: Iterator[TrainingGraph], cluster: Cluster, options: Options
) -> DoesNotFit:
    """Return the refusal with what would fit as its fix, or by how much the best misses.

    `graphs`: the step, read anew as often as it is asked for, since compiling changes it.
    """
    missing: dict[str, int] = {}
    workers = sum(rank.replica is not None for rank in ranks_of(cluster))
    for name, training in zip(names_by_need(workers), graphs, strict=False):
        try:
            needed_bytes = _needed_bytes(
                training, cluster, replace(options, strategy=parse_named(name) or name)
            )
        except DoesNotFit as error:
            missing[name] = error.missing_bytes
        except InputError as error:  # this step cannot be spread so: another name may do
            log.info("--strategy %s is no way out: %s", name, error)
        else:
            fix = f"compile with --strategy {name}: the fullest device then needs {needed_bytes} bytes; "
            return _with_fix(refusal, f"{fix}or {refusal.fix}")
    if not missing:
        return refusal
    best = min(missing, key=missing.__getitem__)
    nearest = f"the nearest, --strategy {best}, misses by {missing[best]} bytes on a device"
    return _with_fix(refusal, f"{refusal.fix}; no other strategy that was tried suffices: {nearest}")


def names_by_need(workers: int) -> Iterator[str]:
    """Yield names that keep less on a device than data parallelism: one thing at a time, then products."""
    if workers > 1:
        yield "fsdp"
    yield from (f"microbatches={count}" for count in MICROBATCHES)
    yield from (f"tensor={parts}" for parts in _divisors(workers))
    yield from (f"pipeline={stages}" for stages in _divisors(workers))
    for stages in (1, *_divisors(workers)):
        for parts in (1, *_divisors(workers // stages)):
            yield from _products(stages, parts, workers // stages // parts)


def _products(stages: int, parts: int, replicas: int) -> Iterator[str]:
    split = [f"tensor={parts}"] if parts > 1 else []
    spreads = [f"pipeline={stages}"] if stages > 1 else [f"microbatches={count}" for count in MICROBATCHES]
    for spread in spreads:
        if split:
            yield ",".join([spread, *split])
        if replicas > 1:
            yield ",".join([spread, f"fsdp={replicas}", *split])


def _divisors(workers: int) -> Iterator[int]:
    return (parts for parts in range(2, workers + 1) if workers % parts == 0)


def _needed_bytes(training: TrainingGraph, cluster: Cluster, options: Options) -> int:
    """Return what the fullest device needs. Raises DoesNotFit, and what compiling raises."""
    compilation = Compilation(training, cluster, options)
    run((*DECIDE, LOWERING, OUTLINE), compilation)
    return max(need.certain_bytes for need in compilation.memory)


def _with_fix(refusal: DoesNotFit, fix: str) -> DoesNotFit:
    return DoesNotFit(refusal.what, at=refusal.at, fix=fix, missing_bytes=refusal.missing_bytes)
