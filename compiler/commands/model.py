"""`partc model`: a model of partc's own, as a forward ONNX graph.

The table of `partc model list`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from partc.compiler.commands.command_line.completion import complete_models
from partc.compiler.commands.console import answer, show, tell
from partc.compiler.commands.results.models import ModelEntry, ModelList, ModelOption, ModelWritten
from partc.compiler.model_files.write_model import write_model
from partc.compiler.output.output_paths import check_output_file
from partc.models.catalogue import (
    MODELS,
    ModelRequestError,
    build_model,
    count_parameters,
    describe_options,
    parse_options,
)
from partc.runtime.errors import BadUsage, one_of

LIST = "list"
EPILOG = "\n\n".join(
    ["Example: partc model mlp --set batch=16 -o forward.onnx"]
    + [
        f"{name}: {model.description}. Options: {', '.join(o.name for o in describe_options(name))}."
        for name, model in MODELS.items()
    ]
)


def model_command(
    name: Annotated[
        str, typer.Argument(help=f"One of: {', '.join(MODELS)}; or list.", autocompletion=complete_models)
    ] = "",
    out: Annotated[Path | None, typer.Option("-o", "--output", help="File to write.")] = None,
    options: Annotated[list[str], typer.Option("--set", help="KEY=VALUE: an option of the model.")] = [],
    listed: Annotated[
        bool, typer.Option("--list", help="Show the models and their parameters, as `partc model list` does.")
    ] = False,
) -> None:
    """Write a model of partc's own as a forward ONNX graph."""
    if listed or (name == LIST and out is None):
        models = ModelList(tuple(_entries()))
        show(_table(models))
        answer(models)
        return
    if name and name not in MODELS:
        raise BadUsage(f"no model {name!r}", at="partc model", fix=one_of((*MODELS, LIST), name))
    if not name or out is None:
        missing = "missing option '-o'" if name else "missing argument 'name'"
        raise BadUsage(missing, at="partc model", fix="see `partc model --help` and `partc model list`")
    check_output_file(out, ())
    try:
        model = build_model(name, **parse_options(options))
    except ModelRequestError as error:  # models stand alone, and know no error of partc's
        raise BadUsage(error.what, at=error.at, fix=error.fix) from error
    write_model(model, out)
    tell(f"{name}: {len(model.graph.node)} nodes -> {out}")
    answer(ModelWritten(name, len(model.graph.node), str(out)))


def _entries() -> Iterator[ModelEntry]:
    for name, model in MODELS.items():
        parameters = count_parameters(build_model(name))
        options = tuple(ModelOption(o.name, o.default, o.description) for o in describe_options(name))
        counts = parameters.dense, parameters.sparse
        yield ModelEntry(name, model.description, *counts, model.published or "", options)


def _table(models: ModelList) -> Table:
    """Return every model with its options' defaults and its parameters, in millions, beside the paper's."""
    table = Table("model", "what it is", box=None)
    for column in ("dense, M", "sparse, M", "paper, M"):
        table.add_column(column, justify="right")
    table.add_column("options", overflow="fold")
    for model in models.models:
        options = ", ".join(f"{option.name}={option.default}" for option in model.options)
        dense, sparse = (f"{count / 1e6:.1f}" for count in (model.dense, model.sparse))
        table.add_row(model.name, model.description, dense, sparse, model.published or "-", options)
    return table
