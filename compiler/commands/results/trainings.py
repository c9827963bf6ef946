"""The answers of commands that train, and that look at what was saved. Times in seconds, sizes in bytes."""

from partc.runtime.plan.record import Record


class Trained(Record, frozen=True):
    """`partc run`: a training.

    requested_steps  to train in all, with those before this run
    first_step    steps that were trained before this run
    steps         trained in all; fewer than `requested_steps` where a signal ended it
    step_s        measured, of this run; null where it had nothing to train
    waited        rank -> the share of the time that it waited for others
    data_waited   the share of the time that the rank waited for data that waited longest for it
    loss          the last one that was heard of; null if none, or not finite
    not_finite_since  the step since which the loss is NaN or infinite; 0 if it is a number, or there is none
    stopped_by    the signal that ended it, 0 if none
    metrics_url   where Prometheus was answered while it went on; empty if nowhere
    reason        why a step took longer or shorter than predicted; empty if it did not
    """

    plan: str
    requested_steps: int
    first_step: int
    steps: int
    step_s: float | None
    predicted_step_s: float
    samples_per_s: float | None
    loss: float | None
    not_finite_since: int
    waited: dict[str, float]
    data_waited: float
    lost_workers: tuple[str, ...]
    stopped_by: int
    variables: str
    model: str
    checkpoints: str
    trace: str
    metrics_url: str
    reason: str


class CheckpointEntry(Record, frozen=True):
    """A checkpoint, or what is wrong with it: then `damage` says that, and nothing else is known."""

    step: int
    damage: str = ""
    seed: int | None = None
    samples: int | None = None
    size_bytes: int | None = None
    ranks: int | None = None
    variables: int | None = None
    written_at: str = ""


class CheckpointList(Record, frozen=True):
    """`partc checkpoint ls`, and `verify`: of checkpoints that were read whole."""

    folder: str
    checkpoints: tuple[CheckpointEntry, ...]


class Exported(Record, frozen=True):
    """`partc checkpoint export`: a forward model with the variables after a step."""

    step: int
    output: str
