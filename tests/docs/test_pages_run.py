"""Every command of the documentation runs: page by page, in order, on small stand-ins for its files."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checks.command_line import done, partc

from .pages import PAGES, ROOT, DocumentedCommand, commands, inline_commands, other_commands
from .stand_ins import make_stand_ins

# Option -> its value here, and path -> another: shorter searches, fewer steps, files of this folder.
SHORTER = {"--budget": "3s", "--save-every": "2"}
ELSEWHERE = {"/shared/data.npz": "data.npz"}
STEPS = {"run": "4", "verify": "2"}  # of the command; --step of a checkpoint is one of these
CHECKPOINT = "2"
# Page and beginning of a command -> what is added, so that a later one finds what it needs.
ADDED = {
    ("docs/commands.md", "run out "): ("--save-every", "2"),
    ("docs/commands.md", "examples copy "): ("elsewhere",),  # examples/ is there
    ("docs/tasks.md", "cluster init"): ("--force",),
}
# Page and command -> what its reader has done before.
RUN = ("run", "out", "--data", "synthetic", "--steps", "12", "-q")
BEFORE = {
    ("docs/commands.md", "compare out/ --html compared.html"): RUN,
    ("docs/tasks.md", "compare out"): RUN,
    ("docs/tasks.md", "run out3 --steps 100000 --resume --checkpoints out/checkpoints"): (
        *("run", "out", "--data", "data.npz", "--steps", "4", "--save-every", "2"),
    ),
}
# Page -> stand-ins that its own commands make.
MADE_THERE = {
    "docs/clusters.md": ["cluster.json"],
    "docs/commands.md": ["cluster.json"],
    "docs/engines.md": ["examples/kubernetes"],
}
# Page and beginning of a command -> why it is not run here. Everything else is.
NOT_RUN = {
    ("README.md", "make "): "makes an environment of its own",
    (
        "README.md",
        "python net.py",
    ): "needs PyTorch: tests/peers/test_readme.py; net.onnx and data.npz stand in",
    ("README.md", "inspect demo/"): "make demo, which tests/test_demo.py runs",
    ("README.md", "compile demo/"): "make demo",
    ("README.md", "run demo/"): "make demo",
    ("README.md", "verify demo/"): "make demo",
    ("docs/tutorial.md", ""): "test_tutorial.py",
    ("docs/engines.md", "PARTC_MPIEXEC="): "Open MPI of a site: tests/runtime/engines/test_open_mpi.py",
    ("docs/engines.md", "srun "): "Slurm: tests/runtime/engines/test_srun.py",
    ("docs/engines.md", "sbatch "): "Slurm",
    ("docs/engines.md", "mpiexec "): "eight ranks: tests/runtime/engines/test_external_launch.py",
    ("docs/engines.md", "kubectl "): "Kubernetes",
    ("docs/faults.md", "make chaos"): "hours, as root",
}
BENCHMARK = re.compile(r"benchmarks/\w+\.py")


def said(command: DocumentedCommand) -> str:
    return " ".join([*([command.before] if command.before else []), *command.arguments])


def reason_not_to_run(command: DocumentedCommand) -> str | None:
    return next(
        (
            reason
            for (page, beginning), reason in NOT_RUN.items()
            if command.page == page and said(command).startswith(beginning)
        ),
        None,
    )


def on_page(page: Path) -> list[DocumentedCommand]:
    """Return a page's commands in order; of the tasks those between words."""
    inline = list(inline_commands(page)) if page.name == "tasks.md" else []
    return sorted([*commands(page), *other_commands(page), *inline], key=lambda command: command.line)


def benchmark_of(command: DocumentedCommand) -> Path | None:
    found = BENCHMARK.search(said(command))
    return ROOT / found[0] if found else None


def shortened(command: DocumentedCommand) -> list[str]:
    """Return a command's words with the values that it has here."""
    words = list(command.arguments)
    for at, word in enumerate(words[:-1]):
        words[at + 1] = SHORTER.get(word, ELSEWHERE.get(words[at + 1], words[at + 1]))
        if word == "--steps":
            words[at + 1] = STEPS[command.arguments[0]]
        elif word == "--step":
            words[at + 1] = CHECKPOINT
    if words[0] in ("search", "profile") and "--budget" not in words:
        words += ["--budget", SHORTER["--budget"]]
    for (page, beginning), more in ADDED.items():
        if command.page == page and said(command).startswith(beginning):
            words += more
    return words


def written_by(words: list[str]) -> list[str]:
    """Return the paths that a command is told to write."""
    return [words[at + 1] for at, word in enumerate(words) if word in ("-o", "--output", "--trace", "--html")]


def run(command: DocumentedCommand) -> None:
    """Run a command in the working directory. Fails unless it succeeds and writes what it says."""
    if command.arguments[0] == "cp":
        shutil.copy(*command.arguments[1:])
        return
    if before := BEFORE.get((command.page, said(command))):
        done(*before)
    words = shortened(command)
    answer = partc(*words)
    assert answer.code == 0, f"{command}: partc {' '.join(words)}\n{answer.error}\n{answer.out[-2000:]}"
    for path in written_by(words):
        assert Path(path).exists(), f"{command}: {path}"


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stand-ins")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_stand_ins(folder)
    return folder


ON_PAGES = {page: on_page(page) for page in PAGES}
TO_RUN = {
    str(page.relative_to(ROOT)): [
        command for command in found if reason_not_to_run(command) is None and benchmark_of(command) is None
    ]
    for page, found in ON_PAGES.items()
}


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page, found in TO_RUN.items() if found])
def test_commands_of_a_page_run_in_order(
    page: str, stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(stand_ins, tmp_path / "here")
    for name in MADE_THERE.get(page, []):
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    monkeypatch.chdir(folder)

    for command in TO_RUN[page]:
        run(command)


BENCHMARKS: dict[Path, list[DocumentedCommand]] = {}
for documented in (command for found in ON_PAGES.values() for command in found):
    if script := benchmark_of(documented):
        BENCHMARKS.setdefault(script, []).append(documented)


@pytest.mark.long
@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_benchmarks_have_the_options_that_pages_give_them(script: Path) -> None:
    """Measurements take minutes to hours, some as root: they are dated where they stand, and not run here."""
    helped = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=120, check=False
    )

    if "No module named 'torch'" in helped.stderr:
        pytest.skip("needs PyTorch")
    assert helped.returncode == 0, helped.stderr
    for command in BENCHMARKS[script]:
        for option in re.findall(r"--[\w-]+", said(command)):
            assert option in helped.stdout, f"{command}: {option}"


def test_what_is_not_run_is_on_the_pages() -> None:
    everything = [command for found in ON_PAGES.values() for command in found]

    for page, beginning in (*NOT_RUN, *ADDED, *BEFORE):
        assert any(c.page == page and said(c).startswith(beginning) for c in everything), (page, beginning)
    assert sum(map(len, TO_RUN.values())) > 70
