"""Every error that partc raises, read from its source, as a page: class, text, where it points, its fix.

`raise BadPlan(f"{path} is of another plan", at=str(path), fix="compile again")` becomes an entry whose
text is "⟨path⟩ is of another plan". What is put together elsewhere stands as the name it has there.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("compiler", "passes", "cost", "runtime", "models", "partc")
ERRORS = "runtime/errors.py"

HEAD = """# Every error

Made from partc's source. Each message has three parts: what is wrong, `at`: where, and `fix`: what to do. On
the command line it ends with exit code 2 (1 where ranks failed, 3 for an InternalError), in Python it is an
exception with these three as attributes. ⟨...⟩ stands for what a message is filled in with.
[Troubleshooting](troubleshooting.md) tells of what has no message.
"""


@dataclass(frozen=True, order=True)
class Raised:
    """One place that makes an error."""

    kind: str
    what: str
    at: str
    fix: str


def page() -> str:
    """Return the page: classes in the order of runtime/errors.py, their texts in alphabetical order."""
    docs = classes()
    parts = [HEAD]
    found = sorted({raised for path in sources() for raised in errors_of(path.read_text(), set(docs))})
    for kind, doc in docs.items():
        entries = [raised for raised in found if raised.kind == kind]
        if entries:
            parts.append(f"## {kind}\n\n{doc}\n")
            parts += [_entry(raised) for raised in entries]
    return "\n".join(parts)


def sources() -> list[Path]:
    """Return all of partc's modules."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def classes() -> dict[str, str]:
    """Return the error classes, in their order, with the first line of what each says of itself."""
    known: dict[str, str] = {}
    for path in (ROOT / ERRORS, *sources()):
        for node in ast.walk(ast.parse(path.read_text())):
            bases = {base.id for base in getattr(node, "bases", []) if isinstance(base, ast.Name)}
            if isinstance(node, ast.ClassDef) and (node.name == "PartcError" or bases & known.keys()):
                known.setdefault(node.name, (ast.get_docstring(node) or "").split("\n\n")[0])
    return known


def errors_of(source: str, kinds: set[str]) -> Iterator[Raised]:
    """Yield the errors of these kinds that a module makes."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in kinds:
            continue
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        if node.args and {"at", "fix"} <= named.keys():
            texts = (_text(node.args[0]), _text(named["at"]), _text(named["fix"]))
            yield Raised(node.func.id, *texts)


def _text(node: ast.expr) -> str:
    """Return a message as a reader meets it, ⟨...⟩ for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) for value in values)
        case ast.FormattedValue(value=value):
            return f"⟨{ast.unparse(value)}⟩"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{_text(body)} | {_text(orelse)}"
    return f"⟨{ast.unparse(node)}⟩"


def _entry(raised: Raised) -> str:
    return f"**{_plain(raised.what)}**\n: at: {_plain(raised.at)}\n\n  fix: {_plain(raised.fix)}\n"


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]<>#|$])", r"\\\1", " ".join(text.split()))
