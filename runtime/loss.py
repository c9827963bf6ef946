"""The loss of a step, as one rank sees it."""

import numpy as np

from partc.runtime.environment import Environment
from partc.runtime.errors import Diverged
from partc.runtime.executor import Executor
from partc.runtime.program import Plan, Rank


def loss_of(plan: Plan, environment: Environment) -> float | None:
    """Return the loss that a worker holds, None if the plan has none."""
    for output in plan.outputs:
        if output.name == plan.loss:
            return float(environment.array(output.value).mean())
    return None


def is_finite(plan: Plan, rank: Rank, executor: Executor) -> bool:
    """Tell whether a worker's loss is a number; a server has none."""
    loss = loss_of(plan, executor.environment) if rank.replica is not None else None
    return loss is None or bool(np.isfinite(loss))


def spoils_loss(executor: Executor) -> bool:
    """Tell whether a rank's own share of the last step's loss is not finite."""
    return not all(np.isfinite(term).all() for term in executor.loss_terms.values())


def diverged(plan: Plan, rank: Rank, executor: Executor, step: int) -> Diverged:
    """Return the error of a rank whose loss is not finite. Steps count from 1."""
    return Diverged(
        f"the loss is {loss_of(plan, executor.environment)} in step {step}",
        at=f"rank {rank.rank} (replica {rank.replica} on {rank.host}/{rank.device})",
        fix="lower the learning rate or check the data; `--on-nan continue` goes on regardless",
    )
