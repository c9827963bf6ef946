"""`partc doctor`: each check, where it works and where it does not."""

from pathlib import Path

import pytest

from partc.compiler.commands.results.machines import Check
from partc.compiler.machines import diagnose as module
from partc.compiler.machines.diagnose import diagnose
from tests.checks.command_line import partc


def found(*names: str) -> dict[str, Check]:
    return {check.name: check for check in diagnose() if check.name in names}


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Leave one check that costs little."""
    monkeypatch.setattr(module, "_CHECKS", {"ports": module._CHECKS["ports"]})
    return monkeypatch


def test_this_installation_works() -> None:
    answer = partc("doctor")

    assert answer.code == 0, answer.out
    assert answer.out.splitlines()[-1] == "partc works here"
    assert "starts two ranks, which add up" in answer.out
    assert "runs a model on the CPU" in answer.out


def test_a_package_that_is_missing_or_old_fails_with_its_command(only: pytest.MonkeyPatch) -> None:
    versions = {"onnx": None, "numpy": "1.26.4", "networkx": "3.3"}
    only.setattr(module, "_version", lambda name: versions.get(name, "99.0"))

    checks = found("onnx", "numpy", "networkx")

    assert (checks["onnx"].status, checks["onnx"].fix) == ("failed", "pip install 'onnx>=1.23'")
    assert checks["numpy"].found == "1.26.4, partc needs 2.0 or newer"
    assert checks["networkx"].status == "ok"
    answer = partc("doctor", "-q")
    assert answer.code == 1
    assert answer.out.splitlines()[-1] == "does not work: onnx, numpy"
    assert not [line for line in answer.out.splitlines() if line.startswith("ok ")]


def test_what_some_uses_alone_need_may_be_absent(only: pytest.MonkeyPatch) -> None:
    only.setattr(module, "_version", lambda name: None if name == "pyarrow" else "99.0")

    assert found("pyarrow")["pyarrow"] == Check(
        "pyarrow",
        "absent",
        "not installed: for training data in Parquet files",
        "pip install 'partc[parquet]'",
    )
    assert partc("doctor").code == 0


def test_an_mpiexec_that_does_not_start_ranks_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "mpiexec"
    broken.write_text("#!/bin/sh\necho no such fabric >&2; exit 9\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PARTC_MPIEXEC", str(broken))
    monkeypatch.setattr(module, "_CHECKS", {"MPI": module._CHECKS["MPI"]})
    check = found("MPI")["MPI"]
    assert check.status == "failed" and "exit code 9: no such fabric" in check.found

    monkeypatch.setenv("PARTC_MPIEXEC", str(tmp_path / "none"))
    assert found("MPI")["MPI"].found == "no mpiexec was found"


def test_a_gpu_without_a_provider_fails_and_no_gpu_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr(module, "_CHECKS", {"GPUs": module._CHECKS["GPUs"]})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found("GPUs")["GPUs"].status == "absent"

    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 0, NVIDIA H200, 143771\n")
    smi.chmod(0o755)
    check = found("GPUs")["GPUs"]
    assert check.status == "failed" and check.found.startswith(
        "NVIDIA H200; onnxruntime has no CUDA provider"
    )


def test_little_shared_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHECKS", {"shared memory": module._CHECKS["shared memory"]})
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(module, "SHARED_BYTES", 1 << 60)
    check = found("shared memory")["shared memory"]

    assert check.status == "absent" and "--shm-size=1g" in check.fix


def test_a_check_that_raises_is_a_check_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Check:
        raise ImportError("libfoo.so.3: cannot open shared object file")

    monkeypatch.setattr(module, "_CHECKS", {"solving": broken})

    assert found("solving")["solving"].found == "ImportError: libfoo.so.3: cannot open shared object file"
