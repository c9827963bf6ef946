"""What a training writes into, its alone: the folder of the plan, and that of its checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from partc.runtime.checkpoints.not_saved import probe_folder
from partc.runtime.jobs.job import Checkpoints
from partc.runtime.jobs.job_folder import locked_folder


@contextmanager
def training_folders(plan_folder: Path, checkpoints: Checkpoints | None) -> Iterator[None]:
    """Keep other trainings, and what writes plans, out of both; make the one of checkpoints.

    Raises BadUsage while another process holds one of them, and NotSaved where no checkpoint can be written.
    """
    with locked_folder(plan_folder):
        if checkpoints is None:
            yield
            return
        folder = Path(checkpoints.folder)
        is_new = not folder.exists()
        probe_folder(folder)
        with locked_folder(folder):
            try:
                yield
            finally:
                if is_new:
                    with suppress(OSError):  # it has checkpoints
                        folder.rmdir()
