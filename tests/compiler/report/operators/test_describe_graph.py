"""The columns of the page, held against the user's file, the segments' files, the programs and shapes."""

from math import prod
from pathlib import Path

import numpy as np
import pytest

from partc.compiler.differentiation.build import build_training_graph
from partc.compiler.differentiation.updates.optimizers import SGD
from partc.compiler.importing.import_training import import_training_graph
from partc.models.catalogue import build_model
from partc.runtime.plan.boxes import is_empty
from partc.runtime.plan.program import Run, Start, instructions_of
from tests.builders.plans.compiled_steps import compile_step
from tests.compiler.report.operators.conftest import BATCH, SIZES, Page, page_of

FLOAT = 4  # bytes
LAYERS = ("MatMul:MatMul_3", "MatMul:MatMul_8", "MatMul:MatMul_14")


@pytest.fixture(params=["mesh_page", "server_page"])
def page(request: pytest.FixtureRequest) -> Page:
    return request.getfixturevalue(request.param)


def test_nodes_are_those_of_the_users_file_in_its_order(page: Page) -> None:
    names = page.columns["nodes"]["name"]

    assert names[: page.columns["users"]] == [node.name for node in page.model.graph.node]
    assert [page.columns["nodes"]["ops"][op] for op in page.columns["nodes"]["op"]][
        : page.columns["users"]
    ] == [node.op_type for node in page.model.graph.node]


def test_devices_are_those_whose_programs_run_a_copy(page: Page) -> None:
    names = [name for name in page.columns["nodes"]["name"] if page.ranks_that_run(name)]

    assert len(names) > 100
    for name in names:
        assert set(page.node(name)["ranks"]) == page.ranks_that_run(name), name


def test_what_no_device_computes_says_why(page: Page) -> None:
    without = [name for name in page.columns["nodes"]["name"] if not page.node(name)["ranks"]]

    assert without
    assert not any(page.ranks_that_run(name) for name in without)
    assert {page.node(name)["words"] for name in without} == {
        "worked out when compiling: no device computes it"
    }


def test_bytes_are_those_of_a_ranks_parts(mesh_page: Page) -> None:
    first, second, _ = (mesh_page.node(name) for name in LAYERS)
    features, hidden, _, _ = SIZES

    # Samples in two; columns of the first weight in two, and rows of the second.
    assert first["in"] == FLOAT * (BATCH // 2 * features + features * hidden // 2)
    assert first["out"] == FLOAT * (BATCH // 2 * hidden // 2)
    assert second["in"] == FLOAT * (BATCH // 2 * hidden // 2 + hidden // 2 * hidden)
    assert second["out"] == FLOAT * (BATCH // 2 * hidden)
    assert mesh_page.columns["nodes"]["shapes"][first["shape"]] == f"{BATCH} × {hidden}"


def test_splits_are_told_in_words(mesh_page: Page) -> None:
    words = [mesh_page.node(name)["words"] for name in LAYERS]

    assert words[0] == "split into 2 by samples and 2 by output columns"
    assert words[1] == "split into 2 by samples and 2 by what it sums"
    assert mesh_page.node(LAYERS[0])["grid"] == (2, 2, 1)
    assert mesh_page.node("Sub:layer0.bias_next")["words"].startswith(
        "split into 2 by axis 0 of its variable"
    )


def test_times_of_all_nodes_are_what_a_rank_computes(mesh_page: Page) -> None:
    busy_s = mesh_page.compilation.timeline.busy_s("compute")

    total_ns = sum(mesh_page.columns["nodes"]["time"])

    assert total_ns == pytest.approx(busy_s[0] * 1e9, rel=0.01)  # all ranks do the same here


def test_variables_are_kept_where_the_plan_says(page: Page) -> None:
    ranks, first = page.columns["ranks"], len(page.columns["nodes"]["name"])
    names = page.columns["variables"]["name"]

    for rank in page.plan.ranks:
        held = ranks["holdings"][ranks["holds"][rank.rank]]
        assert [names[number - first] for number in held[::3]] == [
            piece.variable for piece in rank.pieces if not is_empty(piece.box)
        ]
    for at, variable in enumerate(page.plan.variables):
        parts = {
            tuple(ranks["holdings"][holds][n + 1 : n + 3])
            for holds in ranks["holds"]
            for n in range(0, len(ranks["holdings"][holds]), 3)
            if ranks["holdings"][holds][n] == first + at
        }
        size = prod(variable.shape) * np.dtype(variable.dtype).itemsize
        assert sum(nbytes for _, nbytes in parts) == page.columns["variables"]["bytes"][at] == size


def test_a_ranks_program_can_be_told_of_the_columns(page: Page) -> None:
    columns, ranks = page.columns["instructions"], page.columns["ranks"]
    for rank in page.plan.ranks:
        sites = ranks["sitesOf"][ranks["sites"][rank.rank]]
        member = ranks["groupsOf"][ranks["groups"][rank.rank]]
        told = [
            (page.columns["segments"]["path"][what] if kind == 0 else tag)
            for kind, at, what, tag in zip(
                *(columns[key] for key in ("kind", "at", "what", "tag")), strict=True
            )
            if (kind == 0 and at in sites) or (kind == 1 and member[at] >= 0)
        ]
        assert told == [
            i.segment if isinstance(i, Run) else i.tag_id
            for i in instructions_of(page.plan, rank)
            if isinstance(i, Run | Start)
        ]
        for group, number in zip(columns["groups"], member, strict=True):
            assert number < 0 or rank.rank in group[number]


def test_what_is_sent_is_about_things_of_the_users(page: Page) -> None:
    messages, first = page.columns["messages"], len(page.columns["nodes"]["name"])

    assert all(messages["about"]["lengths"])
    assert not [words for words in messages["words"] if "@" in words or ".pull" in words]
    sparse = {
        v.name for v in page.plan.variables if v.method in ("all_reduce", "servers") and v.parameter is None
    }
    about = {page.columns["variables"]["name"][n - first] for n in messages["about"]["of"] if n >= first}
    assert sparse <= about  # what is exchanged is found by what is sent for it


def test_rows_on_servers_are_about_table_and_reader(server_page: Page) -> None:
    messages, names = server_page.columns["messages"], server_page.columns["nodes"]["name"]
    gather = next(
        n.name for n in server_page.model.graph.node if "embedding" in n.input and n.op_type == "Gather"
    )
    table = len(names) + server_page.columns["variables"]["name"].index("embedding")
    ends = np.cumsum(messages["about"]["lengths"])
    about = [set(part.tolist()) for part in np.split(np.array(messages["about"]["of"]), ends[:-1])]

    assert (
        sum({names.index(gather), table} <= each for each in about) >= 4
    )  # ids out and rows back, twice each
    assert server_page.node(gather)["words"] == "split into 2 by the rows that each server owns"


def test_every_way_of_a_parameter_has_its_predicted_time(server_page: Page) -> None:
    columns = server_page.columns["variables"]
    choices = {choice.variable: choice for choice in server_page.compilation.costs.choices}

    for name, times in zip(columns["name"], columns["times"], strict=True):
        told_s = sorted(ns / 1e9 for _, ns in times)
        assert told_s == pytest.approx(
            sorted(choices[name].seconds.values()) if name in choices else [], rel=1e-3
        )


def test_columns_along_the_axis_of_replicas_are_not_told_as_samples(tmp_path: Path) -> None:
    step = build_training_graph(
        build_model("lenet", batch=8), loss="softmax_cross_entropy", optimizer=SGD(0.1)
    )
    out = tmp_path / "out"
    compiled = compile_step(import_training_graph(step), out, "2x2", "one-weird-trick", "global")
    page = page_of(compiled.compilation, step, out)

    own = {op.op: op.split for op in compiled.compilation.strategy.ops}
    dense = [node for node in step.graph.node if node.name in own and node.op_type in ("Gemm", "MatMul")]
    assert dense
    for node in dense:
        along = next(dimension for dimension, axis in own[node.name].items() if axis == "data")
        told = {"out:1": "output columns", "out:0": "output rows"}.get(along, "what it sums")
        assert page.node(node.name)["words"] == f"split into 4 by {told}"
        assert page.node(node.name)["grid"] == (1, 4, 1)
    convolutions = [node.name for node in step.graph.node if node.op_type == "Conv"]
    assert {page.node(name)["words"] for name in convolutions} == {"split into 4 by samples"}
