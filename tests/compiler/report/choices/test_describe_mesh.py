"""The report of a mesh: its grid, what a rank keeps, and how variables are split."""

from pathlib import Path

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.compiler.report.choices.describe_mesh import describe_mesh
from partc.models.catalogue import build_model
from tests.builders.graphs.attention_block import attention_step
from tests.builders.plans.compiled_steps import compile_step


def test_a_mesh_and_its_parts_are_told(tmp_path: Path) -> None:
    training = import_training_graph(attention_step(SGD(0.1)))
    compiled = compile_step(training, tmp_path / "out", "2x2", "data=2,tensor=2", "global")

    mesh = describe_mesh(compiled.compilation)

    assert mesh is not None
    assert mesh.axes == "data 2 × tensor 2"
    sentences = [sentence.replace("\u00a0", " ") for sentence in mesh.sentences]
    assert sentences[0].startswith("2 replicas of 2 workers")
    assert sentences[1] == "Rank 0 keeps a part of 7 variables (1,040 elements of 2,080) and 7 whole."
    rows = {row.names: (row.shape, row.split, row.part) for row in mesh.parted}
    assert rows[("Wq", "Wk", "Wv")] == ("16 × 16", "axis 1 in 2 along tensor", "16 × 8")
    page = (compiled.folder.path / "report.html").read_text()
    assert "The workers are a mesh of data 2 × tensor 2." in page
    assert "7 of them kept in parts, on a mesh of data 2 × tensor 2." in page


def test_replicas_that_keep_everything_are_no_mesh(tmp_path: Path) -> None:
    training = import_training_graph(attention_step(SGD(0.1)))

    compiled = compile_step(training, tmp_path / "out", "1x2", "allreduce", "global")

    assert describe_mesh(compiled.compilation) is None


def test_parts_that_are_alike_in_several_stages_share_a_line(tmp_path: Path) -> None:
    forward = build_model("mlp", sizes=(16, 16, 16, 16, 16), batch=8)
    step = build_training_graph(forward, loss="softmax_cross_entropy", optimizer=SGD(0.1))
    compiled = compile_step(
        import_training_graph(step), tmp_path / "out", "1x4", "pipeline=2,tensor=2,microbatches=2", "global"
    )

    mesh = describe_mesh(compiled.compilation)

    assert mesh is not None and mesh.parted
    told = [(row.shape, row.split, row.part) for row in mesh.parted]
    assert len(set(told)) == len(told)
    stages = {piece.variable: rank.sites for rank in compiled.plan.ranks for piece in rank.pieces}
    assert any(len({stages[name] for name in row.names}) > 1 for row in mesh.parted)
