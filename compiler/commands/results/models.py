"""The answers of commands about models and training steps."""

from partc.compiler.differentiation.coverage import OpCoverage
from partc.compiler.inspect import InspectedPart, InspectedVariable
from partc.passes.search.operators.find_groups import OperatorGroup
from partc.runtime.plan.record import Record
from partc.runtime.plan.variables import DataInput


class ModelWritten(Record, frozen=True):
    """`partc model`: a forward graph."""

    model: str
    nodes: int
    output: str


class ModelOption(Record, frozen=True):
    """An option of a model, as `--set` takes it."""

    name: str
    default: str
    description: str


class ModelEntry(Record, frozen=True):
    """A model and the number of its parameters' elements, with the options as they are by default."""

    name: str
    description: str
    dense: int
    sparse: int
    published: str  # in millions, dense + sparse, by the Parallax paper; empty where it has none
    options: tuple[ModelOption, ...]


class ModelList(Record, frozen=True):
    """`partc model list`."""

    models: tuple[ModelEntry, ...]


class StepWritten(Record, frozen=True):
    """`partc grad`: a training graph. `decisions`: what is a parameter and what is not, in sentences."""

    nodes: int
    output: str
    decisions: tuple[str, ...]


class Inspected(Record, frozen=True):
    """`partc inspect`: what a training graph holds.

    `departures`: in which ways replicas on batches of their own would not train what one device trains on all
    of them; none where they are proven to. `refusal`: why no reading of the batch is compiled for CPUs.
    """

    variables: tuple[InspectedVariable, ...]
    data_inputs: tuple[DataInput, ...]
    unread_inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    loss: str | None
    parts: tuple[InspectedPart, ...]
    departures: tuple[str, ...]
    touched: tuple[str, ...]
    groups: tuple[OperatorGroup, ...]
    refusal: str


class OpList(Record, frozen=True):
    """`partc ops`: how every standard op is differentiated."""

    ops: tuple[OpCoverage, ...]
