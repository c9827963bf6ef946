"""Which members of a communication supply what goes out, and which end with what arrives."""

from partc.runtime.program import Rank, Start

_ROOTED_RESULTS = frozenset({"reduce", "gather_rows"})
_ROOTED_SOURCES = frozenset({"broadcast", "scatter_rows"})


def sends_at(start: Start, rank: Rank, root: int) -> bool:
    """Tell whether a member supplies the reads: from some kinds' roots alone anything goes out."""
    is_root = root == rank.rank
    return start.senders in rank.sites and (is_root or start.kind not in _ROOTED_SOURCES)


def lands_at(start: Start, rank: Rank, root: int) -> bool:
    """Tell whether a member ends with the writes: at some kinds' roots alone anything arrives."""
    is_root = root == rank.rank
    return start.receivers in rank.sites and (is_root or start.kind not in _ROOTED_RESULTS)
