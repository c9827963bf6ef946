"""An equal quota of CPU for each rank of the jobs that mpiexec starts, so that ranks do not share cores.

    mpiexec ── quota ── rank 0    in a cgroup of its own, with cpu.max or cpu.cfs_quota_us
            ── quota ── rank 1    in another

Needs root and a file system of control groups that can be written to, of version 1 or 2:

    with cpu_quotas(4, cores_each=0.5):
        Runner(folder).train(data, steps)
"""

import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from namespaces import environment

from partc.runtime.engines.engine import find_mpiexec

ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
QUOTA_US = 1_000  # the least that Linux takes, so that half a core is half as quick for short work, too
# mpiexec tells every rank its number. What ends with the rank leaves its group empty.
QUOTA = """#!/bin/sh
echo $$ > {groups}$PMI_RANK/cgroup.procs
exec "$@"
"""
MPIEXEC = """#!/bin/sh
options=
while [ "${{1#-}}" != "$1" ]; do options="$options $1 $2"; shift 2; done
exec {mpiexec} $options {quota} "$@"
"""


def quotas_root() -> Path | None:
    """Return the folder in which groups with quotas can be made, None where there is none."""
    for root in ROOTS:
        group = root / "partc-probe"
        try:
            group.mkdir()
        except OSError:
            continue
        files = {path.name for path in group.iterdir()}
        group.rmdir()
        if files & {"cpu.max", "cpu.cfs_quota_us"}:
            return root
    return None


@contextmanager
def cpu_quotas(ranks: int, cores_each: float) -> Iterator[None]:
    """Let mpiexec start each of up to so many ranks with a quota; raises SystemExit where none can be set."""
    root = quotas_root()
    if root is None:
        raise SystemExit(
            f"quotas of CPU need root and a cgroup file system: none of {', '.join(map(str, ROOTS))}"
        )
    with ExitStack() as stack:
        for rank in range(ranks):
            group = root / f"partc-{rank}"
            group.mkdir(exist_ok=True)
            stack.callback(group.rmdir)
            _set_period(group, round(QUOTA_US / cores_each))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        quota = _script(folder / "quota", QUOTA.format(groups=root / "partc-"))
        mpiexec = _script(folder / "mpiexec", MPIEXEC.format(mpiexec=find_mpiexec(), quota=quota))
        stack.enter_context(environment({"PARTC_MPIEXEC": str(mpiexec)}))
        yield


def _set_period(group: Path, period_us: int) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{QUOTA_US} {period_us}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(period_us))
        (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))


def _script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
