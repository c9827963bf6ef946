"""What kernels a step consists of: under a strategy, and in the parts that a search may choose."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import onnx

from partc.compiler.compilation import Compilation
from partc.compiler.options import Options
from partc.compiler.pipeline import DECIDE, LOWERING, run
from partc.compiler.planning.build_plan import build_plan
from partc.compiler.planning.order_step import order_step
from partc.compiler.settle_options import begin_compilation
from partc.cost.cluster.cluster import Cluster, ClusterRank
from partc.cost.simulation.roofline import CountedWork, work_s
from partc.passes.graph.training_graph import TrainingGraph
from partc.passes.layouts.layouts import Layout
from partc.passes.layouts.meshes import Mesh
from partc.passes.scheduling.segment_work import Work
from partc.passes.search.operators.count_work import count_update
from partc.passes.search.operators.group_layouts import GroupLayouts
from partc.passes.search.operators.grouped_step import GroupedStep, group_step
from partc.runtime.errors import InputError
from partc.runtime.log import silent_log
from partc.runtime.plan.program import ABSORBED, KernelWork, Run


@dataclass(frozen=True)
class StepKernels:
    """The kernels of a step, in all the work that it may be; the functions that they call, and their opset.

    `remarks`: what could not be listed, in sentences.
    """

    work: tuple[CountedWork, ...]
    functions: Mapping[str, onnx.FunctionProto]
    opset: int
    remarks: tuple[str, ...] = ()

    def seconds_on(self, rank: ClusterRank, cluster: Cluster) -> dict[str, float]:
        """Return what the roofline says of each kernel, all that one segment has of it; the longest first."""
        seconds_of: dict[str, float] = {}
        for work in self.work:
            for kernel in (each for each in work.kernels if each.key != ABSORBED):
                seconds = work_s(_alone(kernel), rank, cluster)
                seconds_of[kernel.key] = max(seconds, seconds_of.get(kernel.key, 0.0))
        return dict(sorted(seconds_of.items(), key=lambda item: -item[1]))


def _alone(kernel: KernelWork) -> Work:
    touched, streamed = kernel.touched_bytes, kernel.streamed_bytes
    return Work(kernel.flops, touched, streamed, kernel.count, kernel.sorted_ids, kernel.packed_bytes)


def list_kernels(
    read: Callable[[], TrainingGraph], cluster: Cluster, options: Options, with_parts: bool
) -> StepKernels:
    """Return the kernels of a step as the options have it; those of all parts that a search may choose, too.

    `read`: returns the graph anew, since compiling changes it. Raises what compiling raises.
    """
    first = _decided(read(), cluster, options)
    sizes = first.options.sizes
    ordered = first.ordered or order_step(first.analysis, first.lowered, first.strategy, cluster)
    plan = build_plan(first.analysis, ordered, first.strategy, cluster, sizes, None)
    work: list[CountedWork] = [each for each in plan.instructions if isinstance(each, Run)]
    remarks: list[str] = []
    if with_parts:
        try:
            work += _work_of_parts(
                _decided(read(), cluster, replace(options, strategy="auto", batch="global"))
            )
        except InputError as error:
            remarks.append(f"parts that a search may choose are left out: {error.what}")
    opset = first.analysis.training.opset
    return StepKernels(tuple(work), first.lowered.functions, opset, tuple(remarks))


def _decided(training: TrainingGraph, cluster: Cluster, options: Options) -> Compilation:
    compilation = begin_compilation(training, cluster, options)
    with silent_log():
        run((*DECIDE, LOWERING), compilation)
    return compilation


def _work_of_parts(first: Compilation) -> Iterable[Work]:
    """Return what operator groups do under all the splits that they have, and updates of what is kept so."""
    from partc.compiler.search.operators.own_space import OwnSpace  # which needs numba

    own = OwnSpace.of(first)
    if own is None:
        return ()
    step = group_step(first.analysis, own.groups)
    layouts = GroupLayouts(step)
    works: dict[Work, None] = {}
    for number, kind in enumerate(own.space.kinds):
        splits = dict.fromkeys(config.split for config in own.space.configs(number))
        for group in kind.groups:
            for split in splits:
                if (layout := layouts(group, split)) is not None:
                    works.update(dict.fromkeys(layout.work.values()))
                    homes = {place: (home, layout.mesh) for place, home in layout.homes.items()}
                    works.update(dict.fromkeys(_updates(step, layouts, group, homes)))
    return works


def _updates(
    step: GroupedStep, layouts: GroupLayouts, group: int, homes: Mapping[int, tuple[Layout, Mesh]]
) -> Iterator[Work]:
    for parameter in step.updates:
        place = layouts.place(group, parameter)
        if step.homes.get(parameter) == group and place in homes:
            yield count_update(step, parameter, *homes[place])
