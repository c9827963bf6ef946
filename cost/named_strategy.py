"""Strategies that have a name, and products of them: `data=2,tensor=4`, `fsdp`, `pipeline=4,microbatches=8`.

data[=N]   N replicas; without a number, or left out: as many as the workers allow
spatial=K  the K workers of a replica share the rows of its images, and tell neighbours those at the border
tensor=K   the K workers of a replica share its weights, and the ops that read them
fsdp[=N]   N replicas share the variables: each keeps a part, and gathers what it reads
pipeline=K       layers follow each other on K times as many workers, cut where a step is quickest
microbatches=M   each replica's batch in M parts, one after the other; left out, up to four a stage, and one
                 where layers normalise over the whole batch

replicas=R       R replicas of several workers each, which share weights unless more is said

workers=K         the grid is of K workers, whole hosts first, the quickest before others; the others idle

layerwise         alone, or with microbatches: replicas are hosts, layers are divided among a host's devices
one-weird-trick   replicas divide the samples of convolutions and dense layers' columns; with workers at most
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from partc.runtime.errors import BadUsage

AXES = ("data", "spatial", "tensor")  # of the mesh, outermost first
ONE_WEIRD_TRICK = "one-weird-trick"
LAYERWISE = "layerwise"
WORKERS = "workers"
# What goes with one other word at most: which, and why.
_ALONE = {
    LAYERWISE: ("microbatches", "the cluster says how many of each"),
    ONE_WEIRD_TRICK: (WORKERS, "all of them are its replicas"),
}
NAMES = (
    "data", "replicas", "spatial", "tensor", "fsdp", "pipeline", "microbatches", WORKERS, LAYERWISE,
    ONE_WEIRD_TRICK,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NamedStrategy:
    """What a name says: mesh axis -> its size, where it is said; what replicas share; and of a pipeline.

    microbatches    None: as many as suit the pipeline
    divides_layers  replicas are hosts, each of whose workers has some layers
    fills_tensor    the workers of a replica, however many, share its weights
    workers         so many make the grid, and the others idle; None: nobody does
    """

    text: str
    sizes: Mapping[str, int]
    shards_variables: bool
    splits_dense: bool = False
    stages: int = 1
    microbatches: int | None = None
    divides_layers: bool = False
    fills_tensor: bool = False
    workers: int | None = None

    @property
    def divides_more(self) -> bool:
        """Tell whether more is divided than samples and variables, as its strategy's file says it."""
        has_own_layouts = self.splits_dense or self.divides_layers or self.fills_tensor
        is_grid = not self.sizes.keys() <= {"data"} or self.stages * (self.microbatches or 1) > 1
        return has_own_layouts or is_grid

    @property
    def has_replicas_alone(self) -> bool:
        """Tell whether each worker of the grid is a replica that keeps all variables."""
        shares = self.shards_variables or self.fills_tensor
        return self.sizes.keys() <= {"data"} and self.stages == 1 and not shares

    def replicas(self, hosts: Sequence[str]) -> int:
        """Return how many replicas the workers make. `hosts`: of every worker. Raises BadUsage."""
        if self.divides_layers:
            return len(set(hosts))
        return next(iter(self.mesh(len(hosts)).values()))

    def count_of(self, workers: int) -> int:
        """Return how many of the workers make the grid. Raises BadUsage where there are not as many."""
        if self.workers is None:
            return workers
        if self.workers > workers:
            what, fix = f"{self.workers} of {workers} workers", f"use at most {workers}"
            raise BadUsage(what, at=f"--strategy {self.text}", fix=fix)
        return self.workers

    def with_sizes(self, **sizes: int) -> str:
        """Return its words with other sizes of axes; those of one are left out but for replicas."""
        own = {"pipeline": self.stages, "microbatches": self.microbatches or 1, WORKERS: self.workers or 0}
        size_of = {**self.sizes, **own, **sizes}
        names = {"data": "fsdp"} if self.shards_variables else {}
        order = ("data", "spatial", "tensor", "pipeline", "microbatches", WORKERS)
        return ",".join(
            f"{names.get(name, name)}={size_of[name]}"
            for name in order
            if name in size_of and size_of[name] > (0 if name in ("data", WORKERS) else 1)
        )

    def _nearest(self, workers: int) -> str:
        """Return words of the same axes that make a grid: each the largest that fits beside those before."""
        rest, sizes = workers, {}
        for name in ("pipeline", "spatial", "tensor", "data"):
            size = self.stages if name == "pipeline" else self.sizes.get(name, 1)
            sizes[name] = max(n for n in range(1, min(size, rest) + 1) if rest % n == 0)
            rest //= sizes[name]
        sizes["tensor"] *= rest
        return self.with_sizes(**sizes)

    def _with_idle(self, count: int, workers: int) -> str:
        """Return what lets a grid of so many be some of the workers, nothing where it needs more."""
        idle = f"; or let the others idle: --strategy {self.with_sizes(workers=count)}"
        return idle if 0 < count < workers else ""

    def mesh(self, workers: int) -> dict[str, int]:
        """Return the mesh of one stage, of so many workers or some of them.

        Raises BadUsage where they do not make one.
        """
        workers = self.count_of(workers)
        if self.fills_tensor and not workers % self.sizes["data"]:
            return {"data": self.sizes["data"], "tensor": workers // self.sizes["data"]}
        inner = self.stages * prod(size for name, size in self.sizes.items() if name != "data")
        data = self.sizes.get("data", workers // inner)
        if data * inner != workers or not data:
            raise BadUsage(
                f"{self.text!r} does not make a grid of {workers} workers",
                at="--strategy",
                fix=f"let the product of its axes be {workers}, such as --strategy {self._nearest(workers)}"
                + self._with_idle(data * inner, workers),
            )
        return {name: size for name in AXES if (size := {**self.sizes, "data": data}.get(name))}


def parse_named(text: str) -> NamedStrategy | None:
    """Return the named strategy that a text spells, None if it starts like none. Raises BadUsage."""
    sizes: dict[str, int] = {}
    words = [word.strip().partition("=") for word in text.split(",")]
    if words[0][0] not in NAMES:
        return None
    for name, equals, value in words:
        axis = {"fsdp": "data", "replicas": "data"}.get(name, name)
        needs_size = name not in ("data", "fsdp", *_ALONE)
        if name in _ALONE and equals:
            raise _beside_others(name, text)
        if name not in NAMES or (not equals and needs_size) or (equals and not _is_size(value)):
            raise BadUsage(
                f"no strategy {text!r}",
                at=f"--strategy: {name}{equals}{value}",
                fix="write words such as data=2, tensor=4, pipeline=2, microbatches=8 and fsdp, with commas "
                "between them",
            )
        if equals and axis in sizes:
            raise BadUsage(f"two sizes of {axis}", at=f"--strategy {text}", fix="name each axis once")
        if equals:
            sizes[axis] = int(value)
    names = {name for name, _, _ in words}
    stages, microbatches = sizes.pop("pipeline", 1), sizes.pop("microbatches", None)
    workers = sizes.pop(WORKERS, None)
    for name in names & _ALONE.keys():
        if names - {name, _ALONE[name][0]}:
            raise _beside_others(name, text)
    return NamedStrategy(
        text,
        sizes,
        "fsdp" in names,
        splits_dense=ONE_WEIRD_TRICK in names,
        stages=stages,
        microbatches=microbatches,
        divides_layers=LAYERWISE in names,
        fills_tensor="replicas" in names and not names & {"tensor", "spatial", "pipeline"},
        workers=workers,
    )


def _beside_others(name: str, text: str) -> BadUsage:
    other, why = _ALONE[name]
    fix = f"write {name} alone, or with {other}: {why}"
    return BadUsage(f"no strategy {text!r}", at=f"--strategy {text}", fix=fix)


def _is_size(value: str) -> bool:
    return value.isdigit() and int(value) > 0
