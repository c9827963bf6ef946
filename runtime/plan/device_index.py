"""devices/: the segments of each rank in the order in which it runs them, for people and scripts.

    devices/rank-0/segments.json                    of up to 64 ranks each has its own
    devices/rank-0-and-767-more/segments.json       of more, all that run the same segments

They are lists and no links to segments/: links do not survive an archive, an object store or another file
system, and 1,024 ranks would have tens of thousands. What they say follows from plan.json, and is held
against it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from partc.runtime.errors import BadPlan
from partc.runtime.plan.program import Plan, Rank, Run, Site, instructions_of
from partc.runtime.plan.record import Record

FOLDER = "devices/"
MOST_APART = 64  # ranks: of more, those that run the same segments have one file


class SegmentRuns(Record, frozen=True):
    """A segment, and how often a step runs it."""

    file: str
    runs: int


class RankSegments(Record, frozen=True):
    """What ranks run. `ranks`: 0-3,6."""

    ranks: str
    devices: tuple[str, ...]
    sites: tuple[Site, ...]
    segments: tuple[SegmentRuns, ...]


def device_index(plan: Plan) -> dict[str, bytes]:
    """Return the files that list the ranks' segments: path in the plan's folder -> content."""
    alike: dict[tuple[Site, ...], list[Rank]] = {}
    for rank in plan.ranks:
        alike.setdefault(rank.sites, []).append(rank)
    files: dict[str, bytes] = {}
    for ranks in alike.values():
        segments = _segments_of(plan, ranks[0])
        for members in ([rank] for rank in ranks) if len(plan.ranks) <= MOST_APART else (ranks,):
            devices = tuple(rank.device for rank in members)
            listed = RankSegments(
                index_ranges(rank.rank for rank in members), devices, members[0].sites, segments
            )
            more = f"-and-{len(members) - 1}-more" if len(members) > 1 else ""
            path = f"{FOLDER}rank-{members[0].rank}{more}/segments.json"
            files[path] = msgspec.json.format(msgspec.json.encode(listed), indent=1) + b"\n"
    return files


def index_ranges(numbers: Iterable[int]) -> str:
    """Return numbers in a text that stays short: 0-47,50."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)


def write_device_index(plan: Plan, folder: Path) -> tuple[str, ...]:
    """Write the files of `device_index`; return their paths in the folder."""
    files = device_index(plan)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return tuple(files)


def check_device_index(plan: Plan, folder: Path) -> None:
    """Hold the lists of a plan that has them against its program. Raises BadPlan."""
    listed = indices_in(plan.files)
    if not listed:  # plans had none before
        return
    expected = device_index(plan)
    wrong = sorted(set(listed) ^ expected.keys())
    wrong += [name for name in listed if name in expected and (folder / name).read_bytes() != expected[name]]
    if wrong:
        raise BadPlan(
            "a list of segments is not that of plan.json",
            at=str(folder / wrong[0]),
            fix=f"the lists follow plan.json: `partc seal {folder}` writes them anew; to change what a rank "
            "runs, edit plan.json",
        )


def indices_in(files: Mapping[str, str]) -> list[str]:
    """Return those of a plan's files that list ranks' segments."""
    return [name for name in files if name.startswith(FOLDER)]


def _segments_of(plan: Plan, rank: Rank) -> tuple[SegmentRuns, ...]:
    runs = Counter(i.segment for i in instructions_of(plan, rank) if isinstance(i, Run))
    return tuple(SegmentRuns(file, count) for file, count in runs.items())
