"""The loss of a step, as one rank sees it."""

import numpy as np

from partc.runtime.environment import Environment
from partc.runtime.errors import Diverged
from partc.runtime.program import Plan, Rank


def loss_of(plan: Plan, environment: Environment) -> float | None:
    """Return the loss that a worker holds, None if the plan has none."""
    for output in plan.outputs:
        if output.name == plan.loss:
            return float(environment.array(output.value).mean())
    return None


def check_loss(plan: Plan, rank: Rank, environment: Environment, step: int) -> None:
    """Raise Diverged if a worker's loss is not finite. Steps count from 1."""
    loss = loss_of(plan, environment) if rank.replica is not None else None
    if loss is None or np.isfinite(loss):
        return
    raise Diverged(
        f"the loss is {loss} in step {step}",
        at=f"rank {rank.rank} (replica {rank.replica} on {rank.host}/{rank.device})",
        fix="lower the learning rate or check the data; `--on-nan continue` goes on regardless",
    )
