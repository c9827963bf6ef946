"""What every rank is started as: a keeper, and its member, which becomes the daemon.

    python -P -m partc.runtime.supervision.keeper JOB_FOLDER rank BEGIN_RANK HOW DAEMON JOB_FOLDER

HOW is `started` by this job's launcher, or `joined`: by others, and the first rank tells them JOB_FOLDER.
"""

from typing import Literal

How = Literal["started", "joined"]

KEEPER = "partc.runtime.supervision.keeper"
BEGIN_RANK = "partc.runtime.engines.begin_rank"
DAEMON = "partc.runtime.jobs.daemon"
UNTOLD = "-"  # for the job's folder
ENVIRONMENT_FILE = "environment.json"  # in the job's folder: member -> what its environment has besides


def rank_words(how: How, daemon: str, folder: str) -> list[str]:
    """Return what a rank's Python is called with. -P: the working directory may have a partc of its own."""
    return ["-P", "-m", KEEPER, folder, "rank", BEGIN_RANK, how, daemon, folder]
