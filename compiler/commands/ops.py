"""`partc ops`: which ops are differentiated, and how."""

from partc.compiler.commands.console import tell
from partc.compiler.differentiation.coverage import coverage, coverage_lines

EPILOG = "Example: partc ops"


def ops_command() -> None:
    """List the standard ops: which of them `partc grad` differentiates, and how."""
    for line in coverage_lines(coverage()):
        tell(line)
