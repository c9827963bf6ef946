"""`partc compare`: two plans, or a plan and its run, side by side."""

from pathlib import Path
from typing import Annotated

import typer

from partc.compiler.commands.console import answer, show, tell
from partc.compiler.comparison.compare_steps import compare_steps
from partc.compiler.comparison.draw_comparison import comparison_page, comparison_tables, headline_of
from partc.compiler.comparison.read_side import read_side, run_of
from partc.compiler.output.output_paths import check_output_file
from partc.runtime.whole_file import write_whole

EPILOG = "Example: partc compare out-auto out-ps\n\nExample: partc compare out/ --html compared.html"


def compare_command(
    first: Annotated[
        Path, typer.Argument(help="A plan's folder, or the measured.json that a run left there.", metavar="A")
    ],
    second: Annotated[
        Path | None,
        typer.Argument(help="What it is compared with; left out: what A's last run measured.", metavar="[B]"),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="A page to write, too.", metavar="FILE.html")
    ] = None,
) -> None:
    """Compare two plans, or a plan and its run: what moved, and why one is quicker."""
    if html is not None:
        check_output_file(html, (first, second))
    comparison = compare_steps(read_side(first), read_side(run_of(first) if second is None else second))
    for part in comparison_tables(comparison):
        show(part)
    tell(headline_of(comparison))
    if html is not None:
        write_whole(html, comparison_page(comparison).encode())
        tell(f"page -> {html}")
    answer(comparison)
