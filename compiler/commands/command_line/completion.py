"""What a shell offers for an argument: models, strategies, and files of the kind that is meant.

Where there is no such file nothing is offered, and the shell offers all files, and folders to look into.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

CLUSTERS, GRAPHS, JSON, DATA = (".json", ".txt"), (".onnx",), (".json",), (".npz", ".npy", ".parquet")


def complete_files(*suffixes: str) -> Callable[[str], list[str]]:
    """Return what completes the names of files that end so."""

    def complete(incomplete: str) -> list[str]:
        return list(_files(incomplete, suffixes))

    return complete


def complete_plans(incomplete: str) -> list[str]:
    """Return the folders that hold a plan."""
    return [
        name
        for name in _entries(incomplete)
        if (Path(name).expanduser() / "plan.json").is_file() and name.startswith(incomplete)
    ]


def complete_models(incomplete: str) -> list[tuple[str, str]]:
    """Return the names of models, and what they are."""
    from partc.models.catalogue import MODELS

    listed = [("list", "show the models and their options")]
    described = [*((name, model.description) for name, model in MODELS.items()), *listed]
    return [(name, text) for name, text in described if name.startswith(incomplete)]


def complete_strategies(incomplete: str) -> list[str]:
    """Return the names of strategies, and strategy files."""
    from partc.compiler.options import strategy_names

    return [*_starting(strategy_names(), incomplete), *_files(incomplete, JSON)]


def complete_data(incomplete: str) -> list[str]:
    """Return what data may be."""
    return [*_starting(("synthetic",), incomplete), *_files(incomplete, DATA)]


def complete_mechanisms(incomplete: str) -> list[str]:
    """Return the names of mechanisms."""
    from typing import get_args

    from partc.cost.strategy import Mechanism

    return _starting(get_args(Mechanism), incomplete)


def complete_examples(incomplete: str) -> list[str]:
    """Return the names of examples."""
    from partc.compiler.machines.example_files import EXAMPLES, names_of_examples

    return _starting(("all", *names_of_examples(EXAMPLES)), incomplete)


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _files(incomplete: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    return (name for name in _entries(incomplete) if name.endswith(suffixes))


def _entries(incomplete: str) -> Iterator[str]:
    """Yield the entries of the folder that an incomplete path is in, as the path would be written."""
    folder, _, _ = incomplete.rpartition("/")
    before = incomplete[: len(folder) + 1] if "/" in incomplete else ""
    try:
        names = sorted(os.listdir(Path(before or ".").expanduser()))
    except OSError:
        return
    for name in names:
        if f"{before}{name}".startswith(incomplete) and (not name.startswith(".") or "/." in incomplete):
            yield f"{before}{name}"
