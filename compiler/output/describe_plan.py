"""Write what describes a plan as a whole: strategy, cluster, annotated model, report, and plan.json last."""

import msgspec
import onnx

from partc.compiler.compilation import Compilation
from partc.compiler.model_files.model_file import MODEL
from partc.compiler.output.annotate import annotate
from partc.compiler.output.output_paths import PROFILE, REPORT
from partc.compiler.report.describe_messages import with_words
from partc.compiler.report.page import render_report
from partc.cost.cluster.cluster import encode_cluster
from partc.cost.simulation.measured_kernels import Profile, encode_profile
from partc.cost.sparsity import SPARSITY, encode_sparsity
from partc.cost.strategy import encode_strategy
from partc.runtime.plan.device_index import write_device_index
from partc.runtime.plan.plan_folder import sha256_of_file
from partc.runtime.plan.plan_json import encode_plan

ANNOTATED = "annotated.onnx"
WHAT_IF = "what-if.json"


def describe_plan(compilation: Compilation) -> None:
    """Write into the plan's folder. Needs: its segments are written."""
    files, machines = compilation.files, compilation.machines
    folder = files.folder
    compilation.plan = with_words(compilation)
    files.write_initial_values()
    (folder / "strategy.json").write_bytes(encode_strategy(compilation.strategy))
    (folder / "cluster.json").write_bytes(encode_cluster(compilation.cluster))
    if compilation.sparsity is not None:
        (folder / SPARSITY).write_bytes(encode_sparsity(compilation.sparsity))
    if devices := compilation.options.times.devices:
        (folder / PROFILE).write_bytes(encode_profile(Profile(devices=devices)))
    if compilation.what_if is not None:
        what_if = msgspec.json.encode(compilation.what_if, order="deterministic")
        (folder / WHAT_IF).write_bytes(msgspec.json.format(what_if, indent=1) + b"\n")
    lowered, model = compilation.lowered, onnx.load(folder / MODEL)
    annotated = annotate(
        model, lowered.native, compilation.shapes, machines, lowered.meshes, files.segments_of
    )
    (folder / ANNOTATED).write_bytes(annotated.SerializeToString(deterministic=True))
    (folder / REPORT).write_text(render_report(compilation, machines, folder), encoding="utf-8")
    write_device_index(compilation.plan, folder)
    # A run adds to the report what it measured, and leaves the plan as it is.
    hashes = {
        str(path.relative_to(folder)): sha256_of_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != REPORT
    }
    step_s = compilation.timeline.step_s
    plan = msgspec.structs.replace(
        compilation.plan,
        files=hashes,
        predicted_step_s=step_s,
        asked_strategy=compilation.options.asked_strategy,
    )
    (folder / "plan.json").write_bytes(encode_plan(plan))
