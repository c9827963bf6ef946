"""NVLinks between the GPUs of this machine, as `nvidia-smi topo -m` prints them.

            GPU0    GPU1    GPU2    NIC0    CPU Affinity    ...
    GPU0     X      NV4     SYS     PHB     0-15                  NV4: four NVLinks join GPU0 and GPU1
    GPU1    NV4      X      NV4     SYS     0-15                  SYS, NODE, PHB, PXB, PIX: PCIe and more
    GPU2    SYS     NV4      X      SYS     16-31

A GPU whose pairs have more links together than it has itself shares them through an NVSwitch.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from partc.cost.cluster.machines import Device, Link

# Per profile how many NVLinks a GPU has, and the bytes a second of one, each way, from the data sheets of
# NVIDIA's SXM modules.
NVLINKS = {
    "p100-sxm2": (4, 20e9),
    "v100": (6, 25e9),
    "a100": (12, 25e9),
    "h100": (18, 25e9),
    "h200": (18, 25e9),
}
SUSTAINED_SHARE = 0.9
NVLINK_LATENCY_S = 1e-6
PCIE_BYTES_PER_S, PCIE_LATENCY_S = 12e9, 0.5e-6  # PCIe 3.0 x16, as in examples/
PCIE_ASSUMED = "PCIe of 12 GB/s from each GPU to its host, beside NVLink"
_PATIENCE_S = 30.0
_STYLE = re.compile(r"\x1b\[[0-9;]*m")

Pairs = Mapping[tuple[int, int], int]


def detect_nvlinks() -> dict[tuple[int, int], int]:
    """Return (GPU, GPU) -> how many NVLinks join them, lower index first; nothing where nobody tells."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    try:
        answer = subprocess.run(
            (command, "topo", "-m"), capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return read_topology(answer.stdout) if answer.returncode == 0 else {}


def read_topology(text: str) -> dict[tuple[int, int], int]:
    """Return the NVLinks of a printed matrix."""
    columns: list[str] = []
    link_counts: dict[tuple[int, int], int] = {}
    for line in text.splitlines():
        words = _STYLE.sub("", line).split()
        if not columns:
            columns = [word for word in words if re.fullmatch(r"GPU\d+", word)]
        elif words and words[0] in columns:
            for column, cell in zip(columns, words[1:], strict=False):
                if links := re.fullmatch(r"NV(\d+)", cell):
                    first, second = sorted(int(name.removeprefix("GPU")) for name in (words[0], column))
                    link_counts[first, second] = int(links[1])
    return link_counts


def join_gpus(host: str, devices: Sequence[Device], pairs: Pairs) -> tuple[tuple[str, ...], tuple[Link, ...]]:
    """Return the switches and links of GPUs that NVLinks join; none where their type has none."""
    by_index = {device.index: device for device in devices if device.profile in NVLINKS}
    own = {pair: count for pair, count in pairs.items() if by_index.keys() >= set(pair)}
    if not own:
        return (), ()
    joined = sorted({index for pair in own for index in pair})
    counts = {index: [count for pair, count in own.items() if index in pair] for index in joined}
    switches: tuple[str, ...] = ()
    if any(sum(counts[index]) > NVLINKS[by_index[index].profile][0] for index in joined):
        switches = (f"{host}/nvswitch",)
        links = [
            _nvlink((by_index[i].name, switches[0]), by_index[i], max(own_counts))
            for i, own_counts in counts.items()
        ]
    else:
        links = [
            _nvlink((by_index[a].name, by_index[b].name), by_index[a], count) for (a, b), count in own.items()
        ]
    # A device with a link of its own has only its links: one leads to the host.
    beside = (Link((by_index[i].name, host), PCIE_BYTES_PER_S, PCIE_LATENCY_S) for i in joined)
    return switches, (*links, *beside)


def _nvlink(ends: tuple[str, str], device: Device, count: int) -> Link:
    return Link(ends, SUSTAINED_SHARE * count * NVLINKS[device.profile][1], NVLINK_LATENCY_S)
