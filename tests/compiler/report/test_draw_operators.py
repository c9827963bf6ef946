"""The pictures of who computes what: their cells are those of the strategy, in the order of its devices."""

import re
from pathlib import Path

import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.report.device_colours import colour_devices
from partc.compiler.report.draw_operators import WIDTH, Area, OperatorPicture, draw_grid, draw_operators
from partc.cost.strategy import MESH_STRATEGY_FORMAT, OpConfig, Strategy
from partc.models.catalogue import build_model
from partc.passes.search.operators.read_configs import OperatorGrid
from tests.builders.plans.compiled_reports import TextReader, plain
from tests.builders.plans.compiled_steps import Compiled, compile_step

DEVICES = ("host0/cpu0", "host0/cpu1", "host1/cpu0", "host1/cpu1")
FORWARD = build_model("mlp", sizes=(16, 16, 16, 16, 8), batch=8)  # four dense layers, three alike
LAYERS = tuple(node.name for node in FORWARD.graph.node if node.op_type == "MatMul")


def compiled(out: Path, strategy: str | Strategy, batch: str = "global") -> Compiled:
    step = build_training_graph(FORWARD, loss="softmax_cross_entropy", optimizer=SGD(0.1))
    return compile_step(import_training_graph(step), out, "2x2", strategy, batch)


def own(*entries: tuple[dict[str, int | str], tuple[int, ...]]) -> Strategy:
    """Return a strategy of the layers' degrees and devices."""
    ops = tuple(
        OpConfig(layer, split, devices=tuple(DEVICES[worker] for worker in workers))
        for layer, (split, workers) in zip(LAYERS, entries, strict=True)
    )
    return Strategy(MESH_STRATEGY_FORMAT, "global", {}, ops=ops)


def pictures_of(step: Compiled) -> tuple[OperatorPicture, ...]:
    drawn = draw_operators(step.compilation)
    assert drawn is not None
    return drawn.drawn


def rows_of(areas: tuple[Area, ...]) -> list[str]:
    """Return the numbers of each row, from top to bottom and from left to right."""
    rows: dict[float, list[Area]] = {}
    for area in areas:
        rows.setdefault(area.y, []).append(area)
    return [" ".join(a.label for a in sorted(rows[y], key=lambda a: a.x)) for y in sorted(rows)]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Two layers alike on the same devices, the third on others, the fourth on one."""
    grid: tuple[dict[str, int | str], tuple[int, ...]] = ({"batch": 2, "out:1": 2}, (3, 1, 2, 0))
    strategy = own(grid, grid, ({"out:1": 2}, (2, 1)), ({"batch": 1}, (1,)))
    return compiled(tmp_path_factory.mktemp("mixed") / "out", strategy)


def test_cells_are_the_parts_in_the_order_of_the_devices(mixed: Compiled) -> None:
    first, second, third = pictures_of(mixed)

    assert rows_of(first.areas) == ["3 1", "2 0"]
    assert rows_of(second.areas) == ["2 1"]
    assert rows_of(third.areas) == ["1"]
    assert [plain(p.divided) for p in (first, second, third)] == [
        "samples in 2 × out:1 in 2",
        "out:1 in 2",
        "whole",
    ]
    assert [p.ranks for p in (first, second, third)] == ["ranks 0–3", "ranks 1–2", "rank 1"]


def test_operators_alike_on_the_same_devices_share_a_picture(mixed: Compiled) -> None:
    first, second, third = pictures_of(mixed)

    assert (first.more, second.more, third.more) == ("1 alike", "", "")
    assert first.title.startswith(f"{LAYERS[0]} and {LAYERS[1]}: samples")


def test_a_device_has_the_colour_of_the_legend_everywhere(mixed: Compiled) -> None:
    drawn = draw_operators(mixed.compilation)
    assert drawn is not None

    colours = {f"{device.rank}": device.colour for host in drawn.hosts for device in host.devices}
    assert [host.host for host in drawn.hosts] == ["host0", "host1"]
    assert len(colours) == 4
    assert all(area.colour == colours[area.label] for p in drawn.drawn for area in p.areas)


def test_the_page_names_pictures_for_readers_who_do_not_see_them(mixed: Compiled) -> None:
    page = (mixed.folder.path / "report.html").read_text(encoding="utf-8")
    section = page[page.index('<section id="operators">') :]
    section = section[: section.index("</section>")]

    assert '<a href="#operators">Operators</a>' in page
    assert len(re.findall(r'<svg [^>]*role="img" aria-label="[^"]+"><title>[^<]+</title>', section)) == 3
    assert section.count("<svg") == 3
    assert "4 operators, in 3 pictures, in the order of the way forward." in plain(TextReader.read(page))


def test_devices_that_compute_nothing_are_told(tmp_path: Path) -> None:
    two: tuple[dict[str, int | str], tuple[int, ...]] = ({"batch": 2}, (0, 2))
    step = compiled(tmp_path / "out", own(two, two, two, two))
    drawn = draw_operators(step.compilation)

    assert drawn is not None
    assert drawn.sentence.endswith("Nothing of them is computed by ranks 1, 3.")


def test_workers_that_do_the_same_share_a_cell(tmp_path: Path) -> None:
    step = compiled(
        tmp_path / "out", Strategy(MESH_STRATEGY_FORMAT, "global", {}, mesh={"data": 2, "twice": 2})
    )

    picture = pictures_of(step)[0]

    assert rows_of(picture.areas) == ["0 1", "2 3"]
    assert plain(picture.divided) == "samples in 2, each part on 2 devices"


def test_colours_of_many_hosts_are_folded_away(tmp_path: Path) -> None:
    step = build_training_graph(FORWARD, loss="softmax_cross_entropy", optimizer=SGD(0.1))
    made = compile_step(import_training_graph(step), tmp_path / "out", "18x2", "tensor=2", "per-replica")

    text = TextReader.read((made.folder.path / "report.html").read_text(encoding="utf-8"))

    assert "14 15 host7" in text
    assert "30 31 host15 The colours of the other 2 hosts 32 33 host16 34 35 host17" in text


@pytest.mark.parametrize("batch", ["global", "per-replica"])
def test_one_mesh_shows_what_it_divides(batch: str, tmp_path: Path) -> None:
    step = compiled(tmp_path / "out", "data=2,tensor=2", batch)

    assert {" | ".join(rows_of(picture.areas)) for picture in pictures_of(step)} == {"0 1 | 2 3"}
    assert all(picture.divided.startswith("samples in\u00a02 × ") for picture in pictures_of(step))


@pytest.mark.parametrize("strategy", ["allreduce", "fsdp"])
def test_plain_data_parallelism_has_no_pictures(strategy: str, tmp_path: Path) -> None:
    step = compiled(tmp_path / "out", strategy)

    assert draw_operators(step.compilation) is None
    assert 'id="operators"' not in (step.folder.path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("samples", "columns", "together"), [(64, 1, 1), (1, 64, 1), (8, 8, 1), (4, 4, 4)])
def test_sixty_four_devices_fill_a_picture_without_overlap(samples: int, columns: int, together: int) -> None:
    workers = iter(range(64))
    parts = tuple(tuple(next(workers) for _ in range(together)) for _ in range(samples * columns))
    grid = OperatorGrid((("batch", samples), ("out:1", columns)), parts)

    height, areas = draw_grid(grid, range(64), colour_devices([f"host{n // 4}" for n in range(64)]))

    assert len(areas) == 64
    assert height <= 130
    for number, area in enumerate(areas):
        assert area.width >= 2
        assert area.height >= 2
        assert 0 <= area.x <= area.x + area.width <= WIDTH + 1e-9
        assert 0 <= area.y <= area.y + area.height <= height + 1e-9
        for other in areas[:number]:
            assert (
                other.x + other.width <= area.x + 1e-9
                or area.x + area.width <= other.x + 1e-9
                or other.y + other.height <= area.y + 1e-9
            )
