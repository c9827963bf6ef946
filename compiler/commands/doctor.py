"""`partc doctor`: what is installed, what works, what is missing."""

from partc.compiler.commands.console import answer, note, tell
from partc.compiler.commands.results.machines import Check, Diagnosis
from partc.compiler.machines.diagnose import diagnose

EPILOG = "Exit code 1 where something fails that partc needs.\n\nExample: partc doctor"
_WIDTH = 20


def doctor_command() -> int:
    """Tell what is installed, what works, and how to get what is missing."""
    checks = []
    for check in diagnose():
        (note if check.status == "ok" else tell)(_line(check))
        checks.append(check)
    failed = [check.name for check in checks if check.status == "failed"]
    answer(Diagnosis(not failed, tuple(checks)))
    tell(f"does not work: {', '.join(failed)}" if failed else "partc works here")
    return 1 if failed else 0


def _line(check: Check) -> str:
    fix = f"\n{' ' * (_WIDTH + 9)}fix: {check.fix}" if check.fix else ""
    return f"{check.status:<8} {check.name:<{_WIDTH}}{check.found}{fix}"
