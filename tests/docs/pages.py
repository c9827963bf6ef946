"""Commands and scripts that the documentation tells readers to run."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
CALL = re.compile(r"    (?:\$ )?(\w+=\S+ |\w+ -n \d+ )?partc (.+)")
OTHER = re.compile(r"    ((?:sudo )?(?:python|make|cp|sbatch|kubectl) .+)")
PLACEHOLDER = re.compile(r"\.\.\.|\[|…")  # of commands that are written short


@dataclass(frozen=True)
class DocumentedCommand:
    """A line of a code block that calls partc, and its words after `partc`.

    before   what stands before it: `srun -n 8`, a variable of the environment
    """

    page: str
    line: int
    arguments: tuple[str, ...]
    before: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def commands(page: Path) -> Iterator[DocumentedCommand]:
    """Yield the commands of a page's code blocks, whole ones alone."""
    lines = page.read_text().splitlines()
    for number, text in enumerate(lines, start=1):
        command = CALL.match(text)
        if not command:
            continue
        said, ahead = command[2], number
        while said.endswith("\\"):
            said = said[:-1] + lines[ahead].strip()
            ahead += 1
        words = tuple(shlex.split(re.split(r"  +[^-\s]", said)[0], comments=True))
        if not PLACEHOLDER.search(" ".join(words)):
            yield DocumentedCommand(str(page.relative_to(ROOT)), number, words, (command[1] or "").strip())


def other_commands(page: Path) -> Iterator[DocumentedCommand]:
    """Yield what a page's code blocks run besides partc, all of its words."""
    for number, text in enumerate(page.read_text().splitlines(), start=1):
        if command := OTHER.match(text):
            words = tuple(shlex.split(re.split(r"   +", command[1])[0], comments=True))
            yield DocumentedCommand(str(page.relative_to(ROOT)), number, words)


def inline_commands(page: Path) -> Iterator[DocumentedCommand]:
    """Yield the commands that stand between a page's words, as `partc run out --steps 5`."""
    for number, text in enumerate(page.read_text().splitlines(), start=1):
        for said in re.findall(r"`partc ([^`]+)`", text):
            yield DocumentedCommand(str(page.relative_to(ROOT)), number, tuple(shlex.split(said)))


def script(page: Path) -> str:
    """Return a page's first Python script."""
    found = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert found, f"{page} has no script"
    return found[1]


def table(page: Path, heading: str) -> list[list[str]]:
    """Return the rows, cells without markup, of the first table whose head has a cell of this text."""
    lines = iter(page.read_text().splitlines())
    next(line for line in lines if line.startswith("|") and heading in _cells(line))
    next(lines)  # what separates the head
    return [_cells(line) for line in takewhile(lambda line: line.startswith("|"), lines)]


def _cells(line: str) -> list[str]:
    return [cell.strip().strip("`*") for cell in line.strip("|").split("|")]
