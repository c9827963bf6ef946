"""Reports of one model on several clusters, compiled once for all tests of this folder, and one browser."""

from collections.abc import Iterator

import pytest

from tests.builders.plans.compiled_reports import CLUSTERS, Compiled, compile_everywhere
from tests.checks.browser import CHROMIUM, Browser


@pytest.fixture(scope="package")
def all_compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Compiled]:
    return compile_everywhere(tmp_path_factory.mktemp("reports"))


@pytest.fixture(params=CLUSTERS)
def compiled(request: pytest.FixtureRequest, all_compiled: dict[str, Compiled]) -> Compiled:
    return all_compiled[request.param]


@pytest.fixture
def on_2x2(all_compiled: dict[str, Compiled]) -> Compiled:
    return all_compiled["cluster-2x2"]


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser
