import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    wanted = project["dependencies"] + project["optional-dependencies"]["test"]

    names = {re.split(r"[<>=;\[ ]", requirement)[0] for requirement in wanted}

    rows = [row.split("|")[1] for row in page.splitlines() if row.startswith("|")]
    explained = {name for row in rows for name in re.findall(r"[a-z0-9-]+", row)}
    assert names - explained == set()
