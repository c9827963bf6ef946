"""`partc seal`: accept a plan that was edited by hand."""

from partc.compiler.commands.arguments.shared_arguments import PlanArgument
from partc.compiler.commands.console import answer, note, tell
from partc.compiler.commands.results.plans import Sealed
from partc.runtime.plan.plan_folder import seal_plan_folder

EPILOG = "Example: partc seal out"


def seal_command(out: PlanArgument) -> None:
    """Accept a plan that you edited by hand: check its program, and write its hashes anew."""
    changed = seal_plan_folder(out)
    answer(Sealed(tuple(changed)))
    if not changed:
        tell("nothing was changed: every hash is right")
        return
    tell(f"accepted: {', '.join(changed)}")
    note("that it ends is checked, not that it trains what the model says: partc verify tells")
