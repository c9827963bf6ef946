"""Begin a training again where a rank failed: from its last checkpoint."""

import time
from collections.abc import Callable

from partc.runtime.errors import RankFailed
from partc.runtime.jobs.results import TrainingResult

LONGEST_WAIT_S = 60.0


def train_with_restarts(
    train: Callable[[bool], TrainingResult],
    restarts: int,
    resume: bool,
    tell: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
    look: Callable[[], None] = lambda: None,
) -> TrainingResult:
    """Train, at most `restarts` times again after a rank failed; each wait is twice as long as the last.

    `train`: takes whether to go on from the newest checkpoint. `look`: is called before each further time.
    Raises the last RankFailed, and at once what would come again: a wrong plan or data, a loss that diverges.
    """
    for number in range(restarts + 1):
        try:
            return train(resume or number > 0)
        except RankFailed as error:
            if number == restarts:
                raise
            wait_s = min(LONGEST_WAIT_S, 2.0**number)
            tell(f"{error.what}, at {error.at}: restart {number + 1} of {restarts} in {wait_s:.0f} s")
            sleep(wait_s)
            look()
    raise AssertionError("a training returns or fails")
