from pathlib import Path

import pytest

from partc.cost.schemas import SCHEMAS, schema_text, write_schemas

COST = Path(__file__).parents[2] / "cost"


@pytest.mark.parametrize("file", SCHEMAS)
def test_published_schema_is_what_the_types_say(file: str) -> None:
    assert (COST / file).read_bytes() == schema_text(file), "run `python -m partc.cost.schemas`"


def test_all_schemas_are_written(tmp_path: Path) -> None:
    write_schemas(tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == set(SCHEMAS)
