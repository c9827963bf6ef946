"""The strategy file of docs/pinning.md is one that partc reads."""

import re
from pathlib import Path

from partc.cost.strategy import read_strategy

from .pages import ROOT


def test_the_file_on_the_page_is_a_whole_strategy(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "pinning.md").read_text()
    found = re.search(r'^    \{"format".*?^    \]\}$', page, re.MULTILINE | re.DOTALL)
    assert found
    (tmp_path / "mine.json").write_text(found[0])

    strategy = read_strategy(tmp_path / "mine.json")

    assert [(entry.op, dict(entry.split)) for entry in strategy.ops] == [("layer3/ff/MatMul", {"out:1": 2})]
