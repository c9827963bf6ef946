"""The published JSON schemas, generated from the types: `python -m partc.cost.schemas` writes them."""

from inspect import cleandoc
from pathlib import Path

import msgspec

from partc.cost.cluster.cluster import Cluster
from partc.cost.comparison import Comparison
from partc.cost.step_account import MeasuredRun
from partc.cost.strategy import Strategy
from partc.cost.what_if import WhatIf
from partc.runtime.plan.program import Plan

SCHEMAS: dict[str, type[msgspec.Struct]] = {
    "cluster.schema.json": Cluster,
    "strategy.schema.json": Strategy,
    "plan.schema.json": Plan,
    "what-if.schema.json": WhatIf,
    "measured.schema.json": MeasuredRun,
    "comparison.schema.json": Comparison,
}


def schema_text(file: str) -> bytes:
    """Return the text of one schema file: equal types give equal bytes."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(SCHEMAS[file])}
    for definition in schema["$defs"].values():  # msgspec before 0.23 leaves docstrings indented
        if "description" in definition:
            definition["description"] = cleandoc(definition["description"])
    return msgspec.json.format(msgspec.json.encode(schema, order="deterministic"), indent=2) + b"\n"


def write_schemas(folder: Path) -> None:
    """Write all schema files."""
    for file in SCHEMAS:
        (folder / file).write_bytes(schema_text(file))


if __name__ == "__main__":
    write_schemas(Path(__file__).parent)
