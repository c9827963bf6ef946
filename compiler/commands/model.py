"""`partc model`: a model of partc's own, as a forward ONNX graph.

The table of `partc model --list`.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from partc.compiler.commands.console import console, tell
from partc.compiler.model_files.model_file import write_model
from partc.compiler.output.output_paths import check_output_file
from partc.models.catalogue import MODELS, ModelRequestError, build_model, describe_options, parse_options
from partc.models.count_parameters import count_parameters
from partc.runtime.errors import BadUsage

EPILOG = "\n\n".join(
    ["Example: partc model lm --set vocab=50000 --set batch=16 -o forward.onnx"]
    + [
        f"{name}: {model.description}. Options: {', '.join(o.name for o in describe_options(name))}."
        for name, model in MODELS.items()
    ]
)


def model_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(MODELS)}.")] = "",
    out: Annotated[Path | None, typer.Option("-o", "--output", help="File to write.")] = None,
    options: Annotated[list[str], typer.Option("--set", help="KEY=VALUE: an option of the model.")] = [],
    show: Annotated[bool, typer.Option("--list", help="Show the models and their parameters.")] = False,
) -> None:
    """Write a model of partc's own as a forward ONNX graph."""
    if show:
        console.print(list_models())
        return
    if not name or out is None:
        missing = "missing option '-o'" if name else "missing argument 'name'"
        raise BadUsage(missing, at="partc model", fix="see `partc model --help` and `partc model --list`")
    check_output_file(out)
    try:
        model = build_model(name, **parse_options(options))
    except ModelRequestError as error:  # models stand alone, and know no error of partc's
        raise BadUsage(error.what, at=error.at, fix=error.fix) from error
    write_model(model, out)
    tell(f"{name}: {len(model.graph.node)} nodes -> {out}")


def list_models() -> Table:
    """Return every model with its options' defaults and its parameters, in millions, beside the paper's."""
    table = Table("model", "what it is", "dense, M", "sparse, M", "paper, M", "options", box=None)
    for name, model in MODELS.items():
        parameters = count_parameters(build_model(name))
        options = ", ".join(f"{option.name}={option.default}" for option in describe_options(name))
        dense, sparse = (f"{count / 1e6:.1f}" for count in (parameters.dense, parameters.sparse))
        table.add_row(name, model.description, dense, sparse, model.published or "-", options)
    return table
