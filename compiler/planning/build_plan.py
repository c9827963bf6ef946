"""Make the plan of a distributed step: program, ranks, variables, data."""

from collections.abc import Mapping

import onnx

from partc.compiler.output.plan_files import PlanFiles
from partc.compiler.output.title_segments import SegmentTitler
from partc.compiler.planning.describe_ranks import OwnedRows, describe_groups, describe_ranks, ranks_at_sites
from partc.compiler.planning.mesh_messages import MeshMessages
from partc.compiler.planning.order_step import OrderedStep, owned_rows
from partc.cost.cluster.cluster import Cluster
from partc.cost.simulation.measured_kernels import NO_TIMES, KernelTimes, prices_sha256
from partc.cost.strategy import Strategy
from partc.passes.analysis import Analysis
from partc.passes.layouts.layouts import MICROBATCHES, REPLICAS, PerReplica, Split
from partc.passes.lowering.lowered_graph import LoweredGraph
from partc.passes.scheduling.make_program import Program, ProgramMaker
from partc.passes.scheduling.outline_segments import SegmentOutliner
from partc.passes.scheduling.schedule import Chunk
from partc.passes.scheduling.write_segments import SegmentWriter
from partc.runtime.plan.program import PLAN_FORMAT, Output, Plan
from partc.runtime.plan.variables import PlanVariable, Stored


def build_plan(
    analysis: Analysis,
    ordered: OrderedStep,
    strategy: Strategy,
    cluster: Cluster,
    sizes: Mapping[str, int],
    files: PlanFiles | None,
    times: KernelTimes | None = None,
) -> Plan:
    """Cut the step into segments; describe every rank. Writes segments into the folder.

    `sizes`: a value for every symbolic size. `files` None: nothing is written, and the plan is good for being
    simulated alone: with these `times` of kernels, or with any.
    """
    lowered, rows = ordered.lowered, owned_rows(strategy, cluster)
    writer = _segment_writer(analysis, ordered, cluster, files, times)
    program = ProgramMaker(
        lowered,
        ordered.turns,
        ordered.repeated,
        MeshMessages(lowered.meshes, cluster).grid,
        writer,
        ordered.late,
    ).make()
    groups = describe_groups(cluster, lowered, program.instructions)
    training = analysis.training
    return Plan(
        format=PLAN_FORMAT,
        model="" if files is None else files.save_model(training),
        batch=strategy.batch,
        replicas=analysis.replicas,
        sizes=dict(sizes),
        loss=training.loss,
        ranks=describe_ranks(training, lowered, program, rows, cluster, groups),
        groups=groups,
        instructions=tuple(program.instructions),
        buffers=tuple(program.buffers),
        slices=tuple(program.slices),
        variables=_describe_variables(analysis, strategy, files),
        data_inputs=tuple(training.data_inputs.values()),
        outputs=_describe_outputs(lowered, program),
        predicted_step_s=0.0,
        cost_cache_sha256=prices_sha256(NO_TIMES),
        files={},
        shard_inputs=tuple(training.shard_inputs.values()),
        drawn_inputs=tuple(training.drawn_inputs.values()),
        aggregation=strategy.aggregation,
        recomputed=ordered.recomputed,
        constants=_row_ends(lowered, rows) | _moments(program),
        unread_inputs=training.unread_inputs,
        microbatches=lowered.meshes.microbatches,
    )


def _row_ends(lowered: LoweredGraph, rows: OwnedRows) -> dict[str, tuple[int, ...]]:
    """Return the constants that tell where each server's rows end."""
    return {
        value: tuple(end for _, end in rows[constant.parameter])
        for value, constant in lowered.constants.items()
        if constant.parameter is not None and constant.holds == "row_ends"
    }


def _moments(program: Program) -> dict[str, tuple[int, ...]]:
    """Return the constants that tell every rank which micro-batch it is."""
    return {name: (number,) for number, name in enumerate(program.moments.get(MICROBATCHES, ()))}


def _segment_writer(
    analysis: Analysis,
    ordered: OrderedStep,
    cluster: Cluster,
    files: PlanFiles | None,
    times: KernelTimes | None,
) -> SegmentWriter | SegmentOutliner:
    opset, lowered = analysis.training.opset, ordered.lowered
    on_cpu = all(device.kind == "cpu" for host in cluster.hosts for device in host.devices)
    if files is None:
        names_kernels = times is None or bool(times.seconds)
        shapes = dict(lowered.shapes)
        return SegmentOutliner(lowered.functions, shapes, names_kernels=names_kernels, on_cpu=on_cpu)
    chunks = {id(turn.item): turn.item for turn in ordered.turns if isinstance(turn.item, Chunk)}
    most = sum(1 + bool(chunk.sums) for chunk in chunks.values())
    titler = SegmentTitler(analysis, lowered, ranks_at_sites(cluster, lowered.meshes), most)

    def save(model: onnx.ModelProto, chunk: Chunk) -> str:
        title, nodes = titler.entitle(model, chunk)
        for node in nodes:
            files.segments_of.setdefault(node, []).append(title)
        return files.save_segment(model, title.name)

    return SegmentWriter(opset, lowered.functions, save, dict(lowered.shapes), on_cpu)


def _describe_variables(
    analysis: Analysis, strategy: Strategy, files: PlanFiles | None
) -> tuple[PlanVariable, ...]:
    variables: list[PlanVariable] = []
    for name, variable in analysis.training.variables.items():
        role = analysis.roles.variables[name]
        parameter = analysis.followers[name] or role.parameter
        gradient = analysis.training.gradients.get(name)
        own = strategy.parameters.get(parameter or name)
        has_method = analysis.followers[name] is not None or name in strategy.parameters
        variables.append(
            PlanVariable(
                name,
                variable.dtype.name,
                variable.shape,
                Stored("", name) if files is None else files.save_initial(name, variable.initial),
                role.role,
                parameter if parameter != name else None,
                gradient is not None and gradient.is_sparse,
                own.method if own is not None and has_method else "replicated",
            )
        )
    return tuple(variables)


def _describe_outputs(lowered: LoweredGraph, program: Program) -> tuple[Output, ...]:
    outputs: list[Output] = []
    for name, value, layout in lowered.outputs:
        value = program.renamed.get(value, value)
        placement = layout.along(REPLICAS)
        if isinstance(placement, Split):
            outputs.append(Output(name, value, "split", placement.axis, layout.site))
        elif isinstance(placement, PerReplica):
            outputs.append(Output(name, value, "per_replica", site=layout.site))
        else:
            outputs.append(Output(name, value, "whole", site=layout.site))
    return tuple(outputs)
