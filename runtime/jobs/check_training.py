"""Refuse a training that cannot be, before anything is begun for it."""

from collections.abc import Collection, Mapping

from partc.runtime.data.batches import check_sizes, fixed_sizes, symbolic_sizes
from partc.runtime.errors import BadUsage, one_of
from partc.runtime.execution.recorder import TracedSteps
from partc.runtime.jobs.job import check_timeout
from partc.runtime.plan.program import Plan


def check_request(
    steps: int, timeout_s: float, read_after: Collection[int], worker_restarts: int, is_kept_twice: bool
) -> None:
    """Refuse what no training can be asked for. Raises BadUsage."""
    if steps < 1:
        raise BadUsage(f"{steps} steps", at="--steps", fix="train at least one step")
    check_timeout(timeout_s, "--timeout")
    if beyond := [step for step in read_after if not 0 < step <= steps]:
        raise BadUsage(f"no step {beyond[0]} of {steps}", at="read_after", fix="count steps from 1")
    if worker_restarts < 0:
        raise BadUsage(f"{worker_restarts} restarts", at="worker_restarts", fix="give 0 or more")
    if is_kept_twice:
        raise BadUsage("variables in two places", at="keep_in", fix="say save=False, too")


def check_trained(trained: int, steps: int, resume: bool) -> None:
    """Refuse steps that led to the first values, but are not before those to train. Raises BadUsage."""
    if trained and resume:
        fix = "leave `trained` out: a checkpoint tells how much was trained"
        raise BadUsage(f"{trained} trained steps beside checkpoints", at="Runner.train(trained=...)", fix=fix)
    if not 0 <= trained < steps:
        raise BadUsage(
            f"{steps} steps in all, of which {trained} are trained",
            at="Runner.train(trained=...)",
            fix="give the number of steps in all, more than are trained",
        )


def check_plan_sizes(sizes: Mapping[str, int], plan: Plan) -> None:
    """Refuse sizes that the plan does not leave open. Raises BadUsage."""
    check_sizes(sizes)
    known, fixed = symbolic_sizes(plan.data_inputs), fixed_sizes(plan)
    if unknown := sorted(sizes.keys() - known - fixed.keys()):
        fix = one_of(sorted(known), unknown[0]) if known else "leave it out: this plan's sizes are all fixed"
        raise BadUsage(f"no symbolic size {unknown[0]!r}", at="sizes", fix=fix)
    if other := sorted(name for name in sizes.keys() & fixed.keys() if sizes[name] != fixed[name]):
        raise BadUsage(
            f"the plan is for {other[0]} = {fixed[other[0]]} alone, not {sizes[other[0]]}",
            at="sizes",
            fix=f"compile with --size {other[0]}={sizes[other[0]]}",
        )


def check_traced(traced: TracedSteps, done: int, steps: int) -> None:
    """Refuse to trace steps that will not be trained, or are none. Raises BadUsage."""
    if isinstance(traced, int):
        if traced < 0:
            fix = "give how many of the last steps, 0 for none"
            raise BadUsage(f"the last {traced} steps are to be traced", at="--trace-steps", fix=fix)
        return
    for first, last in traced:
        if first > last:
            fix = "give the first step of each range, then the last"
            raise BadUsage(f"{first} to {last} are no steps", at="--trace-steps", fix=fix)
        if first <= done or last > steps:
            raise BadUsage(
                f"steps {first} to {last} are to be traced, where {done + 1} to {steps} are trained",
                at="--trace-steps",
                fix="choose among these",
            )
