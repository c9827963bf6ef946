"""Read back from a page what it calls the plan's instructions, for those who have no compilation any more."""

import json
import re

from partc.compiler.report.describe_messages import Words
from partc.compiler.report.packed_json import unpacked

_DATA = re.compile(r'<script type="application/json" class="timeline-data">(.*?)</script>', re.DOTALL)


def words_of_page(page: str) -> dict[int, Words]:
    """Return the words by the instructions' places; nothing where the page has no timeline."""
    match = _DATA.search(page)
    if match is None:
        return {}
    data = unpacked(json.loads(match[1]))
    words = [Words(*fields) for fields in data["words"]]
    return {place: words[number] for place, number in enumerate(data["instructions"]) if number >= 0}
