"""What all tests have in common."""

import signal
import zlib
from pathlib import Path

import pytest

from partc.compiler.model_files import model_file
from partc.compiler.output import describe_plan

COMPILER_TESTS = Path(__file__).parent / "compiler"
TESTS_PER_REPORT = 8
LONG_CASES = Path(__file__).parent / "long_cases.txt"


def pytest_configure() -> None:
    """Let Ctrl-C come through where whoever started this ignores it: a shell does, in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark long what takes seconds and has quicker cases beside it: a suite of minutes is run more often."""
    long_cases = set(LONG_CASES.read_text().splitlines())
    for item in items:
        if item.nodeid.removeprefix("tests/") in long_cases:
            item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def no_child_infers_first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the child that infers a model's shapes to see whether that ends, but in tests marked `forks`.

    Forking a process that has thousands of tests took a fifth of the suite's time.
    """
    if "forks" not in request.keywords:
        monkeypatch.setattr(model_file, "try_inference", lambda model: None)


@pytest.fixture(autouse=True)
def few_reports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out plans' reports outside the compiler's tests, but in those marked `reports` and one in eight.

    Describing plans that no test looks at took a seventh of the suite's time.
    """
    looked_at = request.path.is_relative_to(COMPILER_TESTS) or "reports" in request.keywords
    if not looked_at and zlib.crc32(request.node.nodeid.encode()) % TESTS_PER_REPORT > 0:
        monkeypatch.setattr(describe_plan, "render_report", lambda compilation, cluster, folder: "")
