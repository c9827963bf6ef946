"""Segments that a GPU replays: recorded once as a CUDA graph, and launched as one from then on.

A segment of thousands of nodes takes longer to launch, node by node, than to compute. It is recorded where
all of its nodes have kernels of CUDA's provider and all that it reads and writes keeps its memory; where that
fails, for a kernel that waits for the GPU, it is executed node by node as before.
"""

from collections.abc import Callable, Iterator
from itertools import count

import onnxruntime as ort

from partc.runtime.execution.arrays import Array
from partc.runtime.execution.device import BoundRun, names_on_host
from partc.runtime.execution.environment import Environment
from partc.runtime.log import log
from partc.runtime.plan.program import Run

GRAPH_ID = "gpu_graph_id"  # of a run of a session: a segment may be executed on several sets of values
_numbers = count(1)


class ReplayedRun:
    """One Run instruction that is recorded when it is first executed.

    To record, ONNX Runtime executes a segment twice or more: what it changes in place is put back before
    it is executed once for good.
    """

    def __init__(
        self,
        run: Run,
        session: ort.InferenceSession,
        environment: Environment,
        node_by_node: Callable[[], BoundRun],
    ) -> None:
        options = ort.RunOptions()
        options.add_run_config_entry(GRAPH_ID, str(next(_numbers)))
        self._bound = BoundRun(run, session, environment.device, environment, options)
        self._run = run
        self._environment = environment
        self._node_by_node = node_by_node
        self._is_recorded = False

    def __call__(self) -> None:
        """Execute the segment on the values of now."""
        if not self._is_recorded:
            self._record()
        self._bound()

    def _record(self) -> None:
        before = {value: self._environment.array(value) for value in self._changed_in_place()}
        try:
            self._bound()
        except Exception as error:  # onnxruntime's errors share no narrower class
            log.debug("%s is executed node by node: %s", self._run.segment, error)
            self._bound = self._node_by_node()
        for value, array in before.items():
            self._environment.put(value, array)
        self._environment.arrays.wait()
        self._is_recorded = True

    def _changed_in_place(self) -> Iterator[str]:
        """Yield the values written in memory that is read as well."""
        read = [self._extent(value) for _, value in self._run.reads]
        for _, value in self._run.writes:
            first, end = self._extent(value)
            if any(first < other_end and other_first < end for other_first, other_end in read):
                yield value

    def _extent(self, value: str) -> tuple[int, int]:
        array: Array | None = self._environment.memory(value)
        assert array is not None, "what is recorded keeps its memory"
        first = self._environment.arrays.address(array)
        return first, first + array.nbytes


def can_be_recorded(run: Run, session: ort.InferenceSession, environment: Environment) -> bool:
    """Tell whether a segment reads and writes a GPU's memory, all of it where it stays.

    What a kernel reads in host memory is as it was when it was recorded: constants may be read there.
    """
    value_of = dict((*run.reads, *run.writes))
    on_host = {value_of[name] for name in names_on_host(session) if name in value_of}
    return set(value_of.values()) <= environment.fixed.keys() and on_host <= environment.constants
