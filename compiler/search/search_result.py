"""What a search finds, and whom it tells of it."""

from collections.abc import Callable
from dataclasses import dataclass

from partc.compiler.search.whole_steps import Priced

Show = Callable[[Priced, Priced | None], None]


@dataclass(frozen=True)
class SearchResult:
    """The answer of a search: the quickest, and data parallelism; how many were priced, and could not be.

    `data_parallel`: None where it does not fit in memory.
    `proposals`: configurations of operators that were priced by the task graph. `remarks`: what is known of
    the answer, in sentences.
    """

    best: Priced
    data_parallel: Priced | None
    proposals: int
    priced: int
    refused: int
    seconds: float
    remarks: tuple[str, ...] = ()
