"""The answers of commands that make, price and check plans. Times are in seconds, sizes in bytes."""

from partc.cost.what_if import PricedStep, WhatIf
from partc.runtime.plan.record import Record


class ComparedStrategy(Record, frozen=True):
    """A strategy whose whole step was priced. `names`: of all candidates that came out as this one."""

    names: tuple[str, ...]
    step_s: float


class RankMemory(Record, frozen=True):
    """What a rank needs and its device has."""

    rank: int
    host: str
    device: str
    variables_bytes: int
    buffers_bytes: int
    values_bytes: int
    activations_bytes: int
    process_bytes: int
    limit_bytes: int


class Compiled(Record, frozen=True):
    """`partc compile`: a plan.

    `methods`: parameter -> how its gradient is synchronised. `compared`: of `auto`, the strategy taken first.
    `mesh`: mesh axis -> its size, where the workers are a grid. `phases_s`: wall times of the compilation.
    `what_if`: what --what-if priced.
    """

    plan: str
    report: str
    ranks: int
    replicas: int
    batch: str
    predicted_step_s: float
    methods: dict[str, str]
    compared: tuple[ComparedStrategy, ...]
    mesh: dict[str, int]
    stages: int
    microbatches: int
    memory: tuple[RankMemory, ...]
    departures: tuple[str, ...]
    warnings: tuple[str, ...]
    phases_s: dict[str, float]
    what_if: WhatIf | None


class Decided(Record, frozen=True):
    """`partc compile --decisions-only`: train.onnx, strategy.json and cluster.json in a folder."""

    output: str
    parameters: int


class StrategyFound(Record, frozen=True):
    """`partc search`: the quickest strategy. `data_parallel_s`: null where that does not fit in memory."""

    output: str
    name: str
    step_s: float
    data_parallel_s: float | None
    proposals: int
    priced: int
    refused: int
    searched_s: float
    remarks: tuple[str, ...]


class RankLoad(Record, frozen=True):
    """What a rank does in a predicted step. `draws_s`: its batch, before all else; 0 where not measured."""

    rank: int
    host: str
    device: str
    draws_s: float
    computes_s: float
    communicates_s: float
    sent_bytes: float
    received_bytes: float


class HostTraffic(Record, frozen=True):
    """Bytes that cross a host's border in a step."""

    host: str
    received_bytes: float
    sent_bytes: float


class LinkLoad(Record, frozen=True):
    """What one direction of a link carries in a step; a host's memory has the end `memory`."""

    source: str
    target: str
    bytes: float
    busy_s: float


class Simulated(Record, frozen=True):
    """`partc simulate`: a predicted step. `links`: the busiest first; `trace`: empty where none is.

    `price`: as --what-if has it: samples a second, busiest link, fullest device.
    """

    step_s: float
    price: PricedStep
    ranks: tuple[RankLoad, ...]
    hosts: tuple[HostTraffic, ...]
    links: tuple[LinkLoad, ...]
    measured_segments: int
    trace: str


class CheckedVariable(Record, frozen=True):
    """A variable's worst step. Numbers that are not finite are null."""

    name: str
    verdict: str
    step: int
    max_change: float | None
    max_error: float | None
    limit: float | None


class CheckedLoss(Record, frozen=True):
    """The loss of a step, and that of one device. Numbers that are not finite are null."""

    step: int
    loss: float | None
    reference: float | None
    limit: float | None
    equal: bool


class Verified(Record, frozen=True):
    """`partc verify`: all ranks against one device.

    `departures`: in which ways the plan is known to train otherwise than one device on all samples. There are
    some: it was held against replicas on one device.
    """

    passed: bool
    ranks: int
    replicas: int
    steps: int
    batch: str
    variables: tuple[CheckedVariable, ...]
    losses: tuple[CheckedLoss, ...]
    disagreeing: tuple[str, ...]
    departures: tuple[str, ...]
    summary: str


class Sealed(Record, frozen=True):
    """`partc seal`: the files whose hashes were written anew."""

    changed: tuple[str, ...]


class Materialised(Record, frozen=True):
    """`partc executor --materialise`: the files of one rank."""

    rank: int
    files: tuple[str, ...]
    output: str
    compared: bool  # with the hashes of a plan, to which they are equal
