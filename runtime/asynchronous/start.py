"""The command that starts a process of asynchronous training, here or on another machine.

    localhost     python -m partc.runtime.asynchronous.process JOB_FOLDER PART NUMBER
    elsewhere     ssh ADDRESS "cd FOLDER && exec env NAME=VALUE.. python -m .."      same Python, same paths

PARTC_SSH names another program that is called as ssh is. A remote process ends when its connection does.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from partc.runtime.asynchronous.endpoints import LOCAL
from partc.runtime.errors import BadUsage
from partc.runtime.launcher import RANK_VARIABLES

MODULE = "partc.runtime.asynchronous.process"
_PASSED_ON = ("PYTHONPATH", "PATH")


def command_for(job_folder: Path, part: str, number: int, address: str) -> list[str]:
    """Return the command for a server or worker at an address. Raises BadUsage."""
    started = [sys.executable, "-m", MODULE, str(job_folder.absolute()), part, str(number)]
    if address == LOCAL:
        return started
    remote = f"cd {shlex.quote(os.getcwd())} && exec env {shlex.join([*_variables(os.environ), *started])}"
    return [*_find_ssh(), address, remote]


def _variables(environment: Mapping[str, str]) -> list[str]:
    own = {name: value for name, value in environment.items() if name.startswith("PARTC_")}
    passed = {name: environment[name] for name in _PASSED_ON if name in environment}
    return [f"{name}={value}" for name, value in (RANK_VARIABLES | passed | own).items()]


def _find_ssh() -> list[str]:
    chosen = shlex.split(os.environ.get("PARTC_SSH", "ssh"))
    if not chosen or shutil.which(chosen[0]) is None:
        raise BadUsage(
            "no ssh was found to start processes on other machines",
            at=f"PARTC_SSH={os.environ['PARTC_SSH']}" if "PARTC_SSH" in os.environ else "PATH",
            fix="install an ssh client, or set PARTC_SSH to a program that is called as ssh is",
        )
    return chosen
