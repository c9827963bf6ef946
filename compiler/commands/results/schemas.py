"""Which record each command answers with, and failures of all; `partc schema` shows their JSON schemas.

Failures of all commands have one record, `Failure`.
"""

import msgspec

from partc.compiler.commands.results import machines, models, plans, trainings
from partc.cost.comparison import Comparison
from partc.runtime.plan.record import Record


class Failure(Record, frozen=True):
    """What went wrong, where, and what to do about it. `error`: the name of the exception in Python."""

    error: str
    what: str
    at: str
    fix: str


RESULTS: dict[str, tuple[type[Record], ...]] = {
    "model": (models.ModelWritten, models.ModelList),
    "grad": (models.StepWritten,),
    "inspect": (models.Inspected,),
    "ops": (models.OpList,),
    "compile": (plans.Compiled, plans.Decided),
    "search": (plans.StrategyFound,),
    "simulate": (plans.Simulated,),
    "compare": (Comparison,),
    "profile": (machines.Profiled,),
    "verify": (plans.Verified,),
    "seal": (plans.Sealed,),
    "run": (trainings.Trained,),
    "checkpoint ls": (trainings.CheckpointList,),
    "checkpoint verify": (trainings.CheckpointList,),
    "checkpoint export": (trainings.Exported,),
    "executor": (plans.Materialised,),
    "cluster init": (machines.ClusterWritten,),
    "cluster measure": (machines.ClusterMeasured,),
    "doctor": (machines.Diagnosis,),
    "examples": (machines.ExampleList,),
    "examples copy": (machines.ExamplesCopied,),
    "schema": (machines.SchemaList,),
    "failure": (Failure,),
}


def schema_of(name: str) -> bytes:
    """Return the JSON schema of what a command writes with --json."""
    kinds = RESULTS[name]
    schemas, components = msgspec.json.schema_components(kinds)
    body = schemas[0] if len(kinds) == 1 else {"anyOf": list(schemas)}
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"partc {name} --json" if name != "failure" else "partc ... --json, where it fails",
        **body,
        "$defs": components,
    }
    text = msgspec.json.encode(document, order="deterministic")
    return msgspec.json.format(text, indent=2) + b"\n"
