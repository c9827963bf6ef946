"""The page in a real browser: nothing overflows, nothing is too small, a picture of it can be taken."""

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.models.catalogue import build_model
from tests.builders.plans.compiled_reports import Compiled
from tests.builders.plans.compiled_steps import compile_step

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIETLY = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
PROBE = """
<script>
const page = document.documentElement;
const spills = [...document.querySelectorAll("svg text")].filter(text => {
  const own = text.getBoundingClientRect(), svg = text.ownerSVGElement.getBoundingClientRect();
  return own.width && (own.left < svg.left - 1 || own.right > svg.right + 1);
}).map(text => text.textContent);
const wide = [...document.querySelectorAll("svg .host, svg .server, svg .device")].flatMap(area => {
  const box = area.getBoundingClientRect();
  return [...area.parentNode.querySelectorAll("text")].filter(text => {
    const own = text.getBoundingClientRect();
    return own.left < box.left || own.right > box.right;
  }).map(text => text.textContent);
});
const small = [...document.querySelectorAll("svg text")]
  .filter(text => text.getBoundingClientRect().height < 8).length;
page.dataset.probe = JSON.stringify({overflow: page.scrollWidth - page.clientWidth, spills, wide, small});
</script>
"""
AS_IT_SHOULD_BE = '{"overflow":0,"spills":[],"wide":[],"small":0}'


@pytest.fixture(scope="module")
def chromium() -> str:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    return CHROMIUM


@pytest.mark.parametrize("width", [1280, 800])
def test_browser_shows_the_page_without_overflow(
    compiled: Compiled, chromium: str, width: int, tmp_path: Path
) -> None:
    assert probe(compiled.page, chromium, tmp_path, width) == AS_IT_SHOULD_BE


@pytest.mark.parametrize("width", [1280, 800])
def test_browser_shows_operators_on_many_devices_without_overflow(
    chromium: str, width: int, tmp_path: Path
) -> None:
    forward = build_model("mlp", sizes=(16, 32, 32), batch=16)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))
    devices = tuple(f"host{host}/cpu{cpu}" for host in range(4) for cpu in range(4))
    layers = [node.name for node in forward.graph.node if node.op_type == "MatMul"]
    splits = {"batch": 2, "out:1": 8}, {"batch": 8, "out:1": 2}
    ops = tuple(OpConfig(*entry, devices=devices) for entry in zip(layers, splits, strict=True))
    strategy = Strategy(MESH_STRATEGY_FORMAT, "global", {}, ops=ops)
    compiled = compile_step(import_training_graph(step), tmp_path / "out", "4x4", strategy, "global")
    page = (compiled.folder.path / "report.html").read_text(encoding="utf-8")

    assert '<section id="operators">' in page
    assert probe(page, chromium, tmp_path, width) == AS_IT_SHOULD_BE


def test_browser_takes_a_picture_of_the_page(on_2x2: Compiled, chromium: str, tmp_path: Path) -> None:
    picture = tmp_path / "report.png"

    browse(chromium, on_2x2.folder / "report.html", tmp_path, 1280, f"--screenshot={picture}")

    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1280, 1600)
    assert len(data) > 50_000  # an empty page compresses to a tenth of that


def probe(page: str, chromium: str, folder: Path, width: int) -> str:
    """Return what PROBE finds on a page, all of whose details are open."""
    probed = folder / "probed.html"
    opened = page.replace("<details>", "<details open>")
    probed.write_text(opened.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    dom = browse(chromium, probed, folder, width, "--dump-dom")
    found = re.search(r'data-probe="([^"]*)"', dom)
    assert found is not None, dom[:400]
    return found[1].replace("&quot;", '"')


def browse(chromium: str, page: Path, folder: Path, width: int, action: str) -> str:
    """Open a page in a browser that keeps to itself; return what it prints."""
    command = [
        chromium,
        *QUIETLY,
        f"--user-data-dir={folder / 'browser'}",
        f"--window-size={width},1600",
        action,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
