"""Imports point one way: compiler > passes > cost > runtime. models stands alone. Names have one meaning."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
ORDER = ("compiler", "passes", "cost", "runtime")
MAY_IMPORT = {name: set(ORDER[i:]) for i, name in enumerate(ORDER)}
MAY_IMPORT["compiler"].add("models")
MAY_IMPORT["models"] = {"models"}
SOURCES = [path for name in MAY_IMPORT for path in sorted((ROOT / name).rglob("*.py"))]
PUBLIC_CLASS = re.compile(r"^ *class ([A-Za-z]\w*)", re.MULTILINE)
TYPE = re.compile(r"^([A-Z]\w*[a-z]\w*) = ", re.MULTILINE)
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


@cache
def imported_modules(source: str) -> tuple[str, ...]:
    names: list[str] = []
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import: write the whole path"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


def imported_packages(source: str) -> set[str]:
    return {name.split(".")[1] for name in imported_modules(source) if name.startswith("partc.")}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "partc" else ("partc", *parts))


def circles(sources: Mapping[str, str]) -> list[list[str]]:
    """Return the groups of modules that import each other, wherever in them the imports stand.

    `sources`: module -> its text. An import of a name is one of the module that has it.
    """
    graph = nx.DiGraph()
    for module, source in sources.items():
        for name in imported_modules(source):
            while name and name not in sources:
                name = name.rpartition(".")[0]
            if name and name != module:
                graph.add_edge(module, name)
    return [sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1]


def texts_of(paths: Iterable[Path]) -> dict[str, str]:
    return {module_of(path): path.read_text(encoding="utf-8") for path in paths}


def test_the_sources_are_found() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(MAY_IMPORT)


def test_an_import_against_the_direction_is_seen() -> None:
    source = "from partc.compiler.pipeline import run\nimport partc.passes.layouts.layouts\nimport numpy"

    assert imported_packages(source) == {"compiler", "passes"}


def test_imports_point_downwards() -> None:
    upwards = {
        module: packages
        for module, source in texts_of(SOURCES).items()
        if (packages := imported_packages(source) - MAY_IMPORT[module.split(".")[1]])
    }

    assert upwards == {}


def test_no_modules_import_each_other() -> None:
    assert circles(texts_of([*SOURCES, *(ROOT / "partc").rglob("*.py")])) == []


@pytest.mark.parametrize(
    "hidden",
    [
        "from partc.cost.b import thing",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from partc.cost.b import Thing",
        "def late() -> None:\n    import partc.cost.b",
    ],
)
def test_a_circle_is_seen_wherever_it_is_hidden(hidden: str) -> None:
    sources = {"partc.cost.a": hidden, "partc.cost.b": "from partc.cost import c", "partc.cost.c": ""}

    assert circles(sources) == []
    sources["partc.cost.c"] = "import partc.cost.a"
    assert circles(sources) == [["partc.cost.a", "partc.cost.b", "partc.cost.c"]]


def test_nothing_is_pickled() -> None:
    pickled = {
        module: found
        for module, source in texts_of(SOURCES).items()
        if (found := PICKLES & {name.split(".")[0] for name in imported_modules(source)})
    }

    assert pickled == {}


def loads_code(source: str) -> list[str]:
    """Return calls that make code or objects of what they read: eval, exec, and numpy's pickles."""
    calls = [node for node in nodes_of(source) if isinstance(node, ast.Call)]
    named = [ast.unparse(call.func) for call in calls]
    allowed = [
        name
        for call, name in zip(calls, named, strict=True)
        for word in call.keywords
        if word.arg == "allow_pickle" and ast.unparse(word.value) != "False"
    ]
    return [name for name in named if name in ("eval", "exec")] + allowed


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("eval(text)", ["eval"]),
        ("np.load(path, allow_pickle=True)", ["np.load"]),
        ("np.load(path, allow_pickle=may)", ["np.load"]),
        ("np.savez(path, allow_pickle=False, **arrays)\nre.compile(text)", []),
    ],
)
def test_what_makes_code_of_files_is_seen(source: str, found: list[str]) -> None:
    assert loads_code(source) == found


def test_no_file_is_executed() -> None:
    sources = texts_of(SOURCES)
    executed = {module: found for module, source in sources.items() if (found := loads_code(source))}

    assert executed == {}


def test_every_source_folder_is_installed() -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    folders = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in SOURCES}

    missing = {folder for folder in folders if f'"partc.{folder}"' not in pyproject}

    assert missing == set()


def shared_names(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return each public name of several classes, or of a class and a type elsewhere, with the modules.

    `sources`: module -> its text.
    """
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for module, source in sources.items():
        for name in PUBLIC_CLASS.findall(source):
            modules[name].append(module)
    for module, source in sources.items():
        for name in modules.keys() & set(TYPE.findall(source)):
            modules[name].append(module)
    return {name: found for name, found in modules.items() if len(found) > 1}


def test_two_classes_of_one_name_are_seen() -> None:
    sources = {
        "partc.cost.a": "class Move:\n    class Kind: pass\nclass _Row: pass",
        "partc.runtime.b": "class Move(Record): pass\nclass _Row: pass",
        "partc.runtime.c": "from partc.runtime.b import Move\nclass Kind: pass",
        "partc.runtime.d": "Kind = Literal['a', 'b']\nRank = int",
    }

    assert shared_names(sources) == {
        "Move": ["partc.cost.a", "partc.runtime.b"],
        "Kind": ["partc.cost.a", "partc.runtime.c", "partc.runtime.d"],
    }


def test_a_public_class_name_stands_for_one_thing() -> None:
    assert shared_names(texts_of([*SOURCES, *(ROOT / "partc").rglob("*.py")])) == {}
