"""What every rank's Python is called with."""

import subprocess
import sys
from pathlib import Path

from partc.runtime.engines.rank_command import rank_words


def test_a_rank_imports_the_installed_partc_whatever_the_working_directory_has(tmp_path: Path) -> None:
    (tmp_path / "partc").mkdir()
    (tmp_path / "partc" / "__init__.py").write_text(
        "raise SystemExit('the partc of the working directory')\n"
    )
    words = rank_words("started", "no.daemon", str(tmp_path / "job"))

    begun = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )

    assert "the partc of the working directory" not in begun.stderr
    assert "supervisor.json" in begun.stderr  # what a keeper reads first
