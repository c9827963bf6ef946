"""Cases that are marked long by name are there."""

from pathlib import Path

from tests.conftest import LONG_CASES

ROOT = Path(__file__).parent


def test_every_name_is_a_case_of_a_test() -> None:
    for name in LONG_CASES.read_text().splitlines():
        path, _, case = name.partition("::")
        test, bracket, _ = case.partition("[")
        assert bracket, f"{name} is no case of several"
        assert f"def {test}(" in (ROOT / path).read_text(), name
