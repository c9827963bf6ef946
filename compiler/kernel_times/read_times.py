"""Read what was measured of kernels, for the devices of a cluster."""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import onnx
import onnxruntime

from partc.compiler.options import Options
from partc.compiler.output.output_paths import PROFILE
from partc.cost.cluster.cluster import Cluster
from partc.cost.simulation.measured_kernels import NO_TIMES, KernelTimes, Versions, read_profile, times_for
from partc.runtime.errors import BadProfile, naming
from partc.runtime.log import log


def versions_here() -> Versions:
    """Return the versions of what kernels would be measured with now."""
    return Versions(onnxruntime.__version__, onnx.__version__, version("partc"))


def read_times(path: Path, cluster: Cluster) -> KernelTimes:
    """Return what a profile says of a cluster's devices; warn of what it leaves open. Raises BadProfile."""
    with naming(path, BadProfile):
        times, remarks = times_for(read_profile(path), cluster, versions_here())
    for remark in remarks:
        log.warning("%s: %s", path, remark)
    return times


def times_of_plan(folder: Path, cluster: Cluster) -> KernelTimes:
    """Return the kernels' times that a plan was priced with, as its folder keeps them. Raises BadProfile."""
    path = folder / PROFILE
    if not path.exists():
        return NO_TIMES
    with naming(path, BadProfile):
        return times_for(read_profile(path), cluster, versions_here())[0]


def with_times(options: Options, cluster: Cluster) -> Options:
    """Return the options with the profile that they name read. Raises BadProfile."""
    if not isinstance(options.profile, str | Path):
        return options
    return replace(options, profile=read_times(Path(options.profile), cluster))
