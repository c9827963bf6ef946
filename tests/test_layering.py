"""Imports point one way: compiler > passes > cost > runtime. models stands alone."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("compiler", "passes", "cost", "runtime")
MAY_IMPORT = {name: set(ORDER[i:]) for i, name in enumerate(ORDER)}
MAY_IMPORT["compiler"].add("models")
MAY_IMPORT["models"] = {"models"}
SOURCES = [path for name in MAY_IMPORT for path in sorted((ROOT / name).rglob("*.py"))]
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


def imported_modules(source: str) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import: write the whole path"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imported_packages(source: str) -> set[str]:
    return {name.split(".")[1] for name in imported_modules(source) if name.startswith("partc.")}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_sources_are_found() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(MAY_IMPORT)


def test_an_import_against_the_direction_is_seen() -> None:
    source = "from partc.compiler.driver import compile\nimport partc.passes.sharding.layouts\nimport numpy"

    assert imported_packages(source) == {"compiler", "passes"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]

    assert imported_packages(path.read_text(encoding="utf-8")) <= MAY_IMPORT[folder]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_is_pickled(path: Path) -> None:
    modules = imported_modules(path.read_text(encoding="utf-8"))

    assert PICKLES.isdisjoint(name.split(".")[0] for name in modules)


def test_every_source_folder_is_installed() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    folders = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in SOURCES}

    missing = {folder for folder in folders if f'"partc.{folder}"' not in pyproject}

    assert missing == set()
