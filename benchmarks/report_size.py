"""Open the reports of large plans in headless Chromium: bytes, and seconds until everything is drawn.

    python benchmarks/report_size.py [--layers 96] [--hosts 128 1] [--width 1400 400] [--json FILE]

A deep transformer (large_compile.py's) is compiled for each number of hosts, of 8 devices: as a pipeline of
16 stages where there are 128 hosts, as 8 replicas on one. Allowed are 5 MB and 2 s.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from deep_transformer import DeepTransformer
from large_compile import SIZES, cluster_of
from rows import Row, print_allowed, write_rows

from partc.compiler.api import compile_step
from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.options import Options

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.checks.browser import Browser

ALLOWED_S, ALLOWED_MB = 2.0, 5.0
# From the beginning of the navigation until the frame after the one in which scripts have drawn.
DRAWN_S = """new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() =>
    done(Math.max(performance.now(), performance.getEntriesByType('navigation')[0].loadEventEnd) / 1000))))"""


def strategy_for(hosts: int) -> str:
    return "data=8,tensor=8,pipeline=16,microbatches=8" if hosts == 128 else "data"


def measure(layers: int, hosts: int, widths: list[int], browser: Browser, folder: Path) -> list[Row]:
    body = DeepTransformer(SIZES)
    for _ in range(layers):
        body.append_block()
    train = build_training_graph(body.model(), loss="loss", optimizer=SGD(0.1), folder=folder)
    out = folder / f"out{hosts}"
    compile_step(train, cluster_of(hosts), out, Options(strategy=strategy_for(hosts), batch="global"))
    work = f"{len(train.graph.node)} nodes on {8 * hosts} devices"
    size_mb = (out / "report.html").stat().st_size / 1e6
    rows = [Row(f"{work}: report.html", "partc", size_mb, "MB", size_mb / ALLOWED_MB)]
    for width in widths:
        with browser.open(out / "report.html", width) as page:
            drawn_s = float(page.evaluate(DRAWN_S))
            assert page.errors == []
        rows.append(Row(f"{work}: drawn at {width} px", "partc", drawn_s, "s", drawn_s / ALLOWED_S))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--hosts", type=int, nargs="+", default=[128, 1])
    parser.add_argument("--width", type=int, nargs="+", default=[1400, 400])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Browser(Path(name) / "browser") as browser:
        rows = [
            row
            for hosts in options.hosts
            for row in measure(options.layers, hosts, options.width, browser, Path(name))
        ]
    print_allowed(rows)
    write_rows(rows, options.json)


if __name__ == "__main__":
    main()
