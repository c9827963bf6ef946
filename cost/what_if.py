"""What a step would take on other machines, with other batches or strategies: records with a JSON form."""

from typing import Literal

from partc.runtime.plan.record import Record

WHAT_IF_FORMAT = "partc-what-if/1"

Dimension = Literal["strategy", "links", "latency", "devices", "hosts", "batch"]


class PricedStep(Record, frozen=True):
    """One simulated step.

    samples            of all replicas together; None where no data input says it
    busiest_link       that is occupied longest, and its share of the step; empty: nothing is sent
    memory_bytes       of the device that is fullest, and what it has
    """

    step_s: float
    samples: int | None
    samples_per_s: float | None
    busiest_link: str
    busiest_share: float
    memory_bytes: int
    memory_limit_bytes: int


class PricedChange(Record, frozen=True):
    """A change of one thing, and the step with it.

    value        of the dimension: 0.1 of the links' rate, 4 hosts, tensor=2
    meaning      what that is, in words
    same_plan    the step of this plan as it is; None where it cannot be
    compiled     the step of what `partc compile` makes of the changed input; None where it was not priced
    decisions    that are taken then, in words
    not_priced   why there is no price
    """

    dimension: Dimension
    value: str
    meaning: str
    same_plan: PricedStep | None = None
    compiled: PricedStep | None = None
    decisions: str = ""
    not_priced: str = ""


class WhatIf(Record, frozen=True):
    """what-if.json: a plan's step, and that of each change. `batch`: the plan's, 0 if it is fixed."""

    format: str
    plan: PricedStep
    decisions: str
    hosts: int
    batch: int
    changes: tuple[PricedChange, ...]
