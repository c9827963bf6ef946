"""Which of several processes that somebody has started together this one is, as its environment tells."""

import os
from dataclasses import dataclass

# (rank, size, ranks on this machine): Hydra, Slurm with pmi2; Open MPI; Slurm with any other.
_SIGNS = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ""),
)


@dataclass(slots=True)
class Place:
    """This process among those that were started together. `source`: what says so."""

    rank: int
    size: int
    is_one_machine: bool
    source: str
    has_begun: bool = False  # a job, of which the others will learn


def own_place() -> Place | None:
    """Return which of several processes this one is, None if it was started alone."""
    for rank, size, here in _SIGNS:
        count = os.environ.get(size, "")
        if os.environ.get(rank, "").isdigit() and count.isdigit() and int(count) > 1:
            one_node = os.environ.get("SLURM_STEP_NUM_NODES") == "1"
            is_one_machine = os.environ.get(here) == count if here in os.environ else one_node
            return Place(int(os.environ[rank]), int(count), is_one_machine, f"{rank}, {size}")
    return None
