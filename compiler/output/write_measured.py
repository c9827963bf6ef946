"""Write what a run took beside its prediction into the plan's folder: measured.json, and the report."""

from pathlib import Path

import msgspec

from partc.compiler.comparison.explain_run import ExplainedRun
from partc.compiler.comparison.measured_timeline import measured_timeline, typical_step
from partc.compiler.output.output_paths import MEASURED, REPORT
from partc.compiler.report.describe_measured import with_measured
from partc.runtime.plan.plan_folder import PlanFolder


def write_measured(folder: PlanFolder, explained: ExplainedRun) -> None:
    """Write both, each whole or not at all. A folder without a report gets none."""
    record, report = explained.record, folder.path / REPORT
    text = msgspec.json.format(msgspec.json.encode(record, order="deterministic"), indent=1) + b"\n"
    _replace(folder.path / MEASURED, text)
    if report.exists():
        timeline = measured_timeline(folder.plan, typical_step(explained.steps))
        page = report.read_text(encoding="utf-8")
        page = with_measured(page, folder.plan, record, timeline, explained.line)
        _replace(report, page.encode())


def _replace(path: Path, text: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(text)
    part.replace(path)
