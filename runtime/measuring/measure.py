"""Start a measurement on a cluster's hosts, and collect what its ranks found."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from partc.runtime.launcher import launch
from partc.runtime.measuring.samples import PROBE_FILE, Probe, Sample, samples_file

MODULE = "partc.runtime.measuring.probe"
TIMEOUT_S = 120.0


def measure(probe: Probe, hosts: Sequence[str], addresses: dict[str, str], shared: Path) -> list[Sample]:
    """Return the samples of all ranks. `hosts`: each rank's. `shared`: a folder that all hosts see.

    Raises RankFailed, and leaves measure.log in the shared folder then.
    """
    log = shared / "measure.log"
    with tempfile.TemporaryDirectory(prefix=".measure-", dir=shared) as name:
        folder = Path(name)
        (folder / PROBE_FILE).write_bytes(msgspec.json.encode(probe))
        launch(hosts, folder, log, addresses, None, TIMEOUT_S, MODULE)
        log.unlink()
        return [
            sample
            for rank in range(len(hosts))
            for sample in msgspec.json.decode(samples_file(folder, rank).read_bytes(), type=list[Sample])
        ]
