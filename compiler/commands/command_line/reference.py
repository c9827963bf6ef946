"""The reference of every command, made of what the command line itself declares.

python -m partc.compiler.commands.command_line.reference docs/commands.md
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from partc.compiler.commands.cli import GROUPS, app_for
from partc.compiler.commands.results.schemas import RESULTS

if TYPE_CHECKING:  # typer has click inside, and does not say where
    from typer._click import Command, Context

REGENERATE = "python -m partc.compiler.commands.command_line.reference docs/commands.md"
_OPENING = f"""# Commands

Made from the code: `{REGENERATE}` writes this page, and a test holds it to what the command line says.

Exit codes: 0 done; 1 a verification failed, a check of `partc doctor` failed, or an executor died; 2 what you
gave must change; 3 a mistake of partc's own; 128 + N stopped by signal N.
What nobody reads (`partc run out | head -1`) is dropped: the work is finished, and the exit code the same.

Every command has `--json`, `-q` and `-v`. With `--json` stdout is one JSON document and nothing else;
`partc schema COMMAND` shows its schema, `partc schema failure` that of a command that fails. `-q` writes
results and errors alone, `-v` phases, their times and decisions on stderr. `partc --install-completion` lets
your shell (bash, zsh, fish, PowerShell) complete commands, options, models, strategies and files.
"""


def reference() -> str:
    """Return the page, as Markdown."""
    return _OPENING + "".join(_groups())


def _groups() -> Iterator[str]:
    for panel, commands in GROUPS.items():
        yield f"\n## {panel}\n"
        for name in commands:
            root = typer.main.get_command(app_for(name))
            with root.make_context("partc", [name], resilient_parsing=True) as context:
                yield from _command(root.commands[name], name, context)  # type: ignore[attr-defined]  # a group


def _command(command: "Command", name: str, parent: "Context") -> Iterator[str]:
    """Yield a command, and those below it."""
    context = type(parent)(command, info_name=name, parent=parent)
    yield f"\n### partc {name}\n\n{(command.help or '').strip()}\n"
    below = getattr(command, "commands", {})
    if not below or getattr(command, "invoke_without_command", False):
        yield f"\n    {' '.join(['partc', name, *command.collect_usage_pieces(context)])}\n"
        yield from _parameters(command, context)
    if command.epilog and not below:
        yield f"\n{_as_markdown(command.epilog)}\n"
    if name in RESULTS:
        kinds = " or ".join(f"`{kind.__name__}`" for kind in RESULTS[name])
        yield f"\nWith `--json`: {kinds}.\n"
    for inner in below.values():
        yield from _command(inner, f"{name} {inner.name}", parent)


def _parameters(command: "Command", context: "Context") -> Iterator[str]:
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or parameter.name in ("help", "json", "quiet", "verbose"):
            continue
        by_default = "Arguments" if parameter.param_type_name == "argument" else "Options"
        groups.setdefault(getattr(parameter, "rich_help_panel", None) or by_default, []).append(record)
    if groups:
        yield "\n| | |\n| --- | --- |\n"
    for heading, records in groups.items():
        yield f"| **{heading}** | |\n"
        for names, text in records:
            yield f"| `{_in_code(names)}` | {_in_cell(' '.join(text.split()))} |\n"


def _in_code(text: str) -> str:
    return text.replace("|", "\\|")


def _in_cell(text: str) -> str:
    """Return a text whose signs are no Markdown."""
    return re.sub(r"([|*<\[\]])", r"\\\1", text)


def _as_markdown(epilog: str) -> str:
    """Return an epilog with its example as code."""
    paragraphs = (" ".join(part.split()) for part in epilog.strip().split("\n\n"))
    return "\n\n".join(
        f"    {text.removeprefix('Example: ')}" if text.startswith("Example: ") else text
        for text in paragraphs
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
