"""The table of `partc model --list`."""

from rich.table import Table

from partc.models.catalogue import MODELS, build_model, describe_options
from partc.models.count_parameters import count_parameters


def list_models() -> Table:
    """Return every model with its options' defaults and its parameters, in millions, beside the paper's."""
    table = Table("model", "what it is", "dense, M", "sparse, M", "paper, M", "options", box=None)
    for name, model in MODELS.items():
        counted = count_parameters(build_model(name))
        options = ", ".join(f"{option.name}={option.default}" for option in describe_options(name))
        dense, sparse = (f"{count / 1e6:.1f}" for count in (counted.dense, counted.sparse))
        table.add_row(name, model.description, dense, sparse, model.published or "-", options)
    return table
