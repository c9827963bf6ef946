"""What all tests have in common."""

import pytest

from partc.compiler.model_files import model_file


@pytest.fixture(autouse=True)
def no_child_infers_first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the child that infers a model's shapes to see whether that ends, but in tests marked `forks`.

    Forking a process that has thousands of tests took a fifth of the suite's time.
    """
    if "forks" not in request.keywords:
        monkeypatch.setattr(model_file, "try_inference", lambda model: None)
