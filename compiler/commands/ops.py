"""`partc ops`: which ops are differentiated, and how."""

from partc.compiler.commands.console import answer, tell
from partc.compiler.commands.results.models import OpList
from partc.compiler.differentiation.coverage import coverage, coverage_lines

EPILOG = "Example: partc ops"


def ops_command() -> None:
    """List the standard ops: which of them `partc grad` differentiates, and how."""
    ops = coverage()
    for line in coverage_lines(ops):
        tell(line)
    answer(OpList(ops))
