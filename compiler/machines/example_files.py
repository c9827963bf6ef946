"""The examples, as they lie in the package: one copy, which the repository shows under examples/."""

import ast
import json
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from partc.runtime.errors import BadUsage, one_of

EXAMPLES = Path(str(files("partc.examples")))
_HIDDEN = ("__init__.py",)


def names_of_examples(folder: Path) -> list[str]:
    """Return the examples' paths below their folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return sorted(str(path.relative_to(folder)) for path in files if path.name not in _HIDDEN)


def describe_example(path: Path) -> str:
    """Return what an example says of itself: a cluster's hosts, a script's first line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        hosts = json.loads(text)["hosts"]
        kinds = sorted({device["profile"] for host in hosts for device in host["devices"]})
        counts = sorted({len(host["devices"]) for host in hosts})
        each = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
        return f"cluster: {len(hosts)} host{'s' * (len(hosts) > 1)} of {each} devices ({', '.join(kinds)})"
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].rstrip(".")
    comments = (line.lstrip("#").strip() for line in text.splitlines() if line.startswith("#"))
    sentences = (line for line in comments if line and not line.startswith(("!", "SBATCH")))
    return next(sentences, "").rstrip(".:")


def copy_examples(name: str, target: Path) -> Iterator[Path]:
    """Write one example, a folder of them, or `all`, below a folder; yield the files. Raises BadUsage.

    Nothing is written where something of that name lies there already.
    """
    names = names_of_examples(EXAMPLES)
    chosen = (
        names
        if name == "all"
        else [known for known in names if known == name or known.startswith(f"{name}/")]
    )
    if not chosen:
        raise BadUsage(f"no example {name!r}", at="partc examples copy", fix=one_of((*names, "all"), name))
    sources = {target / known: EXAMPLES / known for known in chosen}
    if there := [path for path in sources if path.exists()]:
        raise BadUsage("a file is there already", at=str(there[0]), fix="name another folder, or remove it")
    for path, source in sources.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, path)
        yield path
