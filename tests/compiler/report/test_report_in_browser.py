"""The page in a real browser: nothing overflows, nothing is too small, a picture of it can be taken."""

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tests.builders.plans.compiled_reports import Compiled

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


@pytest.fixture(scope="module")
def chromium() -> str:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    return CHROMIUM


@pytest.mark.parametrize("width", [1280, 800])
def test_browser_shows_the_page_without_overflow(
    compiled: Compiled, chromium: str, width: int, tmp_path: Path
) -> None:
    probed = tmp_path / "probed.html"
    opened = compiled.page.replace("<details>", "<details open>")
    probed.write_text(opened.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")

    dom = browse(chromium, probed, tmp_path, width, "--dump-dom")

    found = re.search(r'data-probe="([^"]*)"', dom)
    assert found is not None, dom[:400]
    assert found[1].replace("&quot;", '"') == '{"overflow":0,"spills":[],"wide":[],"small":0}'


def test_browser_takes_a_picture_of_the_page(on_2x2: Compiled, chromium: str, tmp_path: Path) -> None:
    picture = tmp_path / "report.png"

    browse(chromium, on_2x2.folder / "report.html", tmp_path, 1280, f"--screenshot={picture}")

    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1280, 1600)
    assert len(data) > 50_000  # an empty page compresses to a tenth of that


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
