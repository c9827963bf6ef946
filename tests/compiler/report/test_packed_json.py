"""What is packed is read back as it was, in Python and by the page's script, and short where it repeats."""

import json
from pathlib import Path

import numpy as np
import pytest

from partc.compiler.report.operators.columns import shortened
from partc.compiler.report.packed_json import GAP, packed, script_json, unpacked
from partc.compiler.report.page import TEMPLATES
from tests.checks.browser import Browser

LAYER = [f"block{{0}}/{op}" for op in ("MatMul", "Add", "Norm", "Gelu", "Dense", "Out", "Sum")]
SAMPLES = {
    "numbers": [3, 3, 3, -7, 2**50, 0, 1] * 9,
    "one number": [5] * 40,
    "no repetition": [n * n * n for n in range(40)],
    "texts": [name.format(layer) for layer in range(12) for name in LAYER],
    "texts with odd numbers": ["a007", "12345678901234567890", "0", "", "x00", "1.50 ms"] * 6,
    "texts with the gap": [f"a{GAP}{n}" for n in range(40)],
    "rows": [[n, f"S{n}", [n] * (n % 3)] for n in range(50)],
    "rows of nothing": [[]] * 30,
    "lists of numbers": [list(range(n % 5)) for n in range(40)],
    "things": [[["AllReduce", 0.25], ["Servers", 1.5]], None, True, {"a": [1, 2]}] * 10,
    "short": [1, "two", None],
}


def drawn(seed: int) -> list[object]:
    """Return a list of one kind, in which stretches come again."""
    rng = np.random.default_rng(seed)
    kinds = (
        int,
        lambda n: f"n{n}/op{n % 3}",
        lambda n: [n, n % 2],
        lambda n: list(range(n % 4)),
        lambda n: n / 7,
    )
    numbers = rng.integers(-3, 9, int(rng.integers(1, 80)))
    again = np.concatenate([numbers] * int(rng.integers(1, 4)) + [numbers[: len(numbers) // 2]])
    kind = kinds[seed % len(kinds)]
    return [kind(int(number)) for number in again]


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_read_back(name: str) -> None:
    assert unpacked(json.loads(json.dumps(packed(SAMPLES[name])))) == SAMPLES[name]


@pytest.mark.parametrize("seed", range(60))
def test_random_lists_are_read_back(seed: int) -> None:
    assert unpacked(json.loads(json.dumps(packed(drawn(seed))))) == drawn(seed)


def test_the_page_s_script_reads_the_same(browser: Browser, tmp_path: Path) -> None:
    data = {**SAMPLES, **{str(seed): drawn(seed) for seed in range(60)}}
    script = (TEMPLATES / "unpack.js").read_text(encoding="utf-8")
    page = (
        f"<!DOCTYPE html><meta charset=utf-8><script type=application/json id=d>{script_json(data)}</script>"
    )
    (tmp_path / "page.html").write_text(f"{page}<script>{script}</script>", encoding="utf-8")

    with browser.open(tmp_path / "page.html") as tab:
        assert tab.evaluate("unpack(JSON.parse(document.getElementById('d').textContent))") == data
        assert tab.errors == []


def test_layers_that_are_alike_take_no_more_bytes() -> None:
    def size(layers: int) -> int:
        names = [name.format(layer) for layer in range(layers) for name in LAYER]
        return len(script_json({"name": names, "time": [n % len(LAYER) * 1000 for n in range(len(names))]}))

    assert size(1000) < size(10) + 60


def test_data_in_a_script_cannot_end_it() -> None:
    data = {"name": ["</script><script>alert(1)</script>", "<!--", "a\u2028b"], "time": [0.123456789, 2.0]}

    text = script_json(shortened(data))

    assert "<" not in text and "\u2028" not in text
    assert json.loads(text) == {"name": data["name"], "time": [0.1235, 2]}
