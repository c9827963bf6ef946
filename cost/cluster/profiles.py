"""What devices can do, where nothing has been measured on the machine at hand.

Rates of GPUs are the vendor's peaks times SUSTAINED_SHARE: large matrix products and streaming
kernels reach three quarters of peak and more (NVIDIA's cuBLAS and stream figures); small ones less.
`start_s` is what starting a segment costs before it does anything, `node_s` what each of its nodes costs
besides its arithmetic and its bytes: on a GPU a launch, which overlaps with the kernels before it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass

SUSTAINED_SHARE = 0.75
GPU_START_S = 5e-6  # a kernel launch as CUDA reports it, 3 to 10 microseconds

# numpy, `b[:] = a` on 512 MB of float32, one thread: 28.9e9 bytes/s read and written together.
# AMD EPYC (family 25, model 17), 2 virtual cores, 2026-11-20. Rounded down: ranks share it.
HOST_MEMORY_BYTES_PER_S = 25e9
MEMORY_LATENCY_S = 2e-6  # one message between two processes of a machine through shared memory

# The executor's own work for a communication, Start and Wait together: 27 of one member each took 1.9 ms
# on the same machine. Every member's own time, whatever its device. Rows between members take two
# collectives, sizes first: 14 more of those took another 2.2 ms.
PER_COMMUNICATION_S = 70e-6
PER_ROWS_S = 150e-6
SLOT_S = 500e-6  # of messages that are ready in one, none begins before the others: one segment's worth

# What a communication waits besides where its members have half a core each, and not all of them are
# running: twelve more of them took 7 ms more on the same machine, 2 x 2 ranks on 2 cores.
OVERSUBSCRIBED_WAIT_S = 500e-6

# onnxruntime 1.31 with the options of device.py, one thread, same machine, 2026-11-22. Steps of models so
# small that they compute nothing: 0.8 to 1.5 microseconds a node. In a chain of one tiny op it is 0.3, for
# its code and its tensors stay in the first cache (docs/decisions/025-what-a-node-costs.md).
CPU_START_S = 30e-6
CPU_NODE_S = 1e-6
PER_VALUE_S = 0.5e-6  # binding what a segment reads or writes

# Unique, which sorts on the CPU: 280e-9 for 128 to 65,536 int64 in any order, 130e-9 where ranks' sorted ids
# follow each other.
PER_SORTED_ID_S = 200e-9

# A process on the CPU learns that a GPU's copy is done: a launch and a stream synchronisation.
STAGING_LATENCY_S = 10e-6  # order of magnitude of cudaMemcpy on small messages, not measured here


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Sustained float32 rates of one device (of one thread, for a CPU)."""

    name: str
    matmul_flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    start_s: float
    node_s: float


def _gpu(name: str, peak_flops_per_s: float, peak_bytes_per_s: float, memory_bytes: int) -> DeviceProfile:
    return DeviceProfile(
        name,
        matmul_flops_per_s=SUSTAINED_SHARE * peak_flops_per_s,
        memory_bytes_per_s=SUSTAINED_SHARE * peak_bytes_per_s,
        memory_bytes=memory_bytes,
        start_s=GPU_START_S,
        node_s=GPU_START_S,
    )


PROFILES = {
    profile.name: profile
    for profile in (
        # numpy, 1024 x 1024 float32 matrix product, OPENBLAS_NUM_THREADS=1: 97e9 flops/s; rate of
        # memory as above. Same machine and day.
        DeviceProfile("cpu-core", 90e9, 20e9, 4 * 2**30, CPU_START_S, CPU_NODE_S),
        # Peaks in float32 outside tensor cores, from each product's NVIDIA data sheet.
        _gpu("titan-xp", 12.15e12, 547.7e9, 12 * 2**30),
        _gpu("p100", 9.3e12, 732e9, 16 * 2**30),  # PCIe card
        _gpu("p100-sxm2", 10.6e12, 732e9, 16 * 2**30),  # with NVLink
        _gpu(
            "k80", 4.37e12, 240e9, 12 * 2**30
        ),  # one of the card's two GPUs, boosted: 8.74e12 and 480e9 are both's
        _gpu("v100", 15.7e12, 900e9, 16 * 2**30),  # SXM2
        _gpu("a100", 19.5e12, 1555e9, 40 * 2**30),  # SXM4 40 GB; TF32 would be 156e12
        _gpu("h100", 66.9e12, 3350e9, 80 * 2**30),  # SXM5; TF32 would be 494e12
        _gpu("h200", 66.9e12, 4800e9, 141 * 10**9),  # SXM5
    )
}


def profiles_sha256() -> str:
    """Return a hash of all rates: plans that name the same were priced alike."""
    rates = {name: asdict(profile) for name, profile in PROFILES.items()}
    return hashlib.sha256(json.dumps(rates, sort_keys=True).encode()).hexdigest()
