"""What a step would take with other machines, strategies and batches: tables, and a choice among rows."""

from collections.abc import Mapping

from partc.compiler.comparison.what_if_rows import what_if_tables
from partc.compiler.report.section import ReportSource


def what_if_section(source: ReportSource) -> Mapping[str, object] | None:
    """Tell what was priced; None where nobody asked."""
    what_if = source.compilation.what_if
    return None if what_if is None else {"tables": what_if_tables(what_if)}
