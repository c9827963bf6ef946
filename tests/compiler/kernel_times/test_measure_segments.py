"""Segments' times: measured once, kept, and used by the simulator."""

from pathlib import Path

import msgspec
import onnx
import pytest

from partc.compiler.kernel_times import measure_segments as measuring
from partc.compiler.kernel_times.measure_segments import cache_file, measure_segments
from partc.cost.simulation.timeline import Measured, simulate
from partc.runtime.errors import UnsupportedModel
from partc.runtime.plan.plan_folder import PlanFolder
from partc.runtime.plan.program import Run, SessionWorker
from tests.builders.plans.compiled_steps import Compiled, cluster_of, compile_step
from tests.whole_steps.test_distributed_numerics import imported


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(measuring.CACHE, str(tmp_path / "cache"))


@pytest.fixture
def compiled(tmp_path: Path) -> Compiled:
    return compile_step(imported("mlp, momentum, clipped"), tmp_path / "out", "2x2", "hybrid")


def test_every_segment_has_a_time_and_it_is_kept(compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_segments(compiled.folder)

    assert found.segments.keys() == {i.segment for i in compiled.plan.instructions if isinstance(i, Run)}
    assert all(0 < seconds < 1 for seconds in (*found.segments.values(), found.beside_s))
    assert cache_file().exists()

    def measured_again(folder: PlanFolder) -> Measured:
        raise AssertionError("it was measured before")

    monkeypatch.setattr(measuring, "_measure", measured_again)
    assert measure_segments(compiled.folder) == found


def test_another_number_of_threads_is_another_time(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_segments(compiled.folder)
    ranks = tuple(msgspec.structs.replace(rank, threads=2) for rank in compiled.plan.ranks)
    plan = msgspec.structs.replace(compiled.plan, ranks=ranks)
    segments = [i.segment for i in plan.instructions if isinstance(i, Run)]
    monkeypatch.setattr(measuring, "_measure", lambda folder: Measured(dict.fromkeys(segments, 1.0), 2.0))

    assert set(measure_segments(PlanFolder(plan, compiled.folder.path)).segments.values()) == {1.0}


def test_a_time_is_of_what_is_computed_wherever_in_a_step(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measure_segments(compiled.folder)
    measured: list[PlanFolder] = []
    monkeypatch.setattr(measuring, "_measure", lambda folder: measured.append(folder) or found)
    path = sorted((compiled.folder.path / "segments").iterdir())[0]
    model = onnx.load(path)
    model.graph.name, model.graph.doc_string = "17-worker-forward", "of another plan"
    model.metadata_props.add(key="partc.ranks", value="0-47")
    onnx.save(model, path)
    assert measure_segments(compiled.folder) == found and not measured

    model.graph.node[0].attribute.add(name="other", i=1, type=onnx.AttributeProto.INT)
    onnx.save(model, path)
    assert measure_segments(compiled.folder) == found and measured


def test_a_broken_cache_is_made_anew(compiled: Compiled) -> None:
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text("{broken")

    assert measure_segments(compiled.folder).segments
    assert msgspec.json.decode(cache_file().read_bytes())


def test_the_simulator_takes_measured_times(compiled: Compiled) -> None:
    cluster = cluster_of("2x2")
    hour = dict.fromkeys((i.segment for i in compiled.plan.instructions if isinstance(i, Run)), 3600.0)

    segments = sum(isinstance(i, Run) for i in compiled.plan.instructions)
    assert 3600 <= simulate(compiled.plan, cluster, Measured(hour)).step_s <= 3600 * segments * 1.01
    assert simulate(compiled.plan, cluster).step_s < 1


def test_gpus_are_refused(compiled: Compiled) -> None:
    ranks = tuple(msgspec.structs.replace(rank, kind="gpu") for rank in compiled.plan.ranks)
    plan = msgspec.structs.replace(compiled.plan, ranks=ranks)

    with pytest.raises(UnsupportedModel, match="--measure"):
        measure_segments(PlanFolder(plan, compiled.folder.path))


def test_sessions_are_refused(compiled: Compiled) -> None:
    plan = msgspec.structs.replace(
        compiled.plan, asynchronous=(SessionWorker("host0", "host0/cpu0", "cpu", 0, 1),)
    )

    with pytest.raises(UnsupportedModel, match="sessions"):
        measure_segments(PlanFolder(plan, compiled.folder.path))
