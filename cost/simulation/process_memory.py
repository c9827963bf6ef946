"""What a CPU rank's process takes besides what its step makes: programs, the next batch, messages in MPI.

A GPU's ranks have theirs in host memory, which is not what their device is checked for.
"""

from partc.cost.simulation.live_memory import input_bytes
from partc.runtime.plan.program import Plan, Rank, Start, instructions_of, members_of

# Python, NumPy, ONNX Runtime and MPICH. The largest resident memory of ranks that train next to nothing, two
# or four on a machine: 93 to 100 MB, of which 50 are of libraries' files, which ranks share (AMD EPYC, Linux,
# onnxruntime 1.31.1, MPICH 5.0.2, `partc run`, VmHWM of /proc/PID/status, 2026-11-30).
PROCESS_BYTES = 98_000_000


def process_bytes(plan: Plan, rank: Rank) -> int:
    """Return what a rank's process takes: a batch is read ahead, and MPI sums in memory of its own."""
    if rank.kind == "gpu":
        return 0
    ahead = (nbytes for _, nbytes in input_bytes(plan, rank))
    sent = (
        start.payload_bytes
        for start in instructions_of(plan, rank)
        if isinstance(start, Start) and len(members_of(plan, start.group, rank)) > 1
    )
    return PROCESS_BYTES + sum(ahead) + max(sent, default=0)
