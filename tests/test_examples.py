"""The examples of batch scripts: sound in themselves, and calling partc as it is."""

import inspect
import re
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from partc.compiler.commands.run import run_command
from partc.runtime.engines.allotted_nodes import HOST_FILES

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted((EXAMPLES / "slurm").glob("*.sbatch"))
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))


def options_of_run() -> set[str]:
    parameters = inspect.signature(run_command).parameters
    said = [word for parameter in parameters.values() for word in get_args(parameter.annotation)]
    declared = (getattr(word, "param_decls", None) for word in said)
    named = {f"--{name.replace('_', '-')}" for name in parameters}
    return named | {option for options in declared for option in options or ()}


def assert_known(words: list[str]) -> None:
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= options_of_run()


def test_there_are_examples() -> None:
    assert SCRIPTS and MANIFESTS


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_batch_script_is_sound(script: Path) -> None:
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    text = script.read_text().replace("\\\n", " ")

    assert checked.returncode == 0, checked.stderr
    (called,) = re.findall(r"^exec (?:.* )?partc run (.*)$", text, re.MULTILINE)
    assert_known(called.split())
    assert len(re.findall(r"^#SBATCH --nodes=\d+$", text, re.MULTILINE)) == 1


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_is_one_of_mpi_operators(manifest: Path) -> None:
    job: dict[str, Any] = yaml.safe_load(manifest.read_text())  # Any: parsed YAML
    spec, replicas = job["spec"], job["spec"]["mpiReplicaSpecs"]

    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert spec.keys() <= {
        "mpiImplementation",
        "slotsPerWorker",
        "sshAuthMountPath",
        "runPolicy",
        "mpiReplicaSpecs",
    }
    assert spec["mpiImplementation"] == "MPICH" and "HYDRA_HOST_FILE" in HOST_FILES
    assert replicas.keys() == {"Launcher", "Worker"} and replicas["Launcher"]["replicas"] == 1
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    assert launcher["command"][:2] == ["partc", "run"]
    assert_known(launcher["command"])
    for part in replicas.values():
        pod = part["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for c in pod["containers"] for mount in c["volumeMounts"]} == volumes
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert "/dev/shm" in {mount["mountPath"] for mount in worker["volumeMounts"]}
