"""The benchmark of large graphs runs; what it measures is in docs/benchmarks.md."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "differentiate_large.py"


def measured(nodes: int, folder: Path) -> list[dict[str, object]]:
    file = folder / "rows.json"
    command = [sys.executable, str(BENCHMARK), "--nodes", str(nodes), "--repeat", "1", "--json", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(file.read_text())  # type: ignore[no-any-return]


def test_the_benchmark_writes_a_row_for_each_work(tmp_path: Path) -> None:
    differentiate, imported = measured(200, tmp_path)

    assert differentiate.keys() == {"work", "system", "value", "unit", "ratio"}
    assert differentiate["system"] == imported["system"] == "partc"
    assert imported["ratio"] is None
