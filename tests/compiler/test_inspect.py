from rich.console import Console

from partc.compiler.inspect import inspect_graph
from partc.compiler.planning.choose_reading import describe_departures, judge_step
from partc.passes.roles.find_gradients import find_gradients
from tests.builders.graphs.foreign_steps import ADAM, CLIPPED, COUNTED, SGD, SQUARED, TABLE, import_step


def shown(text: str, flops: dict[str, int] | None = None) -> str:
    training = import_step(text)
    find_gradients(training)
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    departures = describe_departures(judge_step(training, {}))
    console.print(inspect_graph(training, flops, departures=departures).render())
    return console.export_text()


def test_variables_inputs_and_parts_are_listed() -> None:
    text = shown(ADAM)

    for line in (
        "W        │ parameter │ float32 │ 4 x 3",
        "m        │ slot of W",
        "loss: loss",
        "main computation",
    ):
        assert line in text


def test_sparse_gradients_and_ranges_are_told() -> None:
    text = shown(TABLE)

    assert "sparse" in text
    assert "0 to 9" in text


def test_a_gradient_that_is_not_found_is_told() -> None:
    (line,) = (line for line in shown(SQUARED).splitlines() if line.startswith("│ W "))
    assert "unfound" in line


def test_flops_are_summed_by_part() -> None:
    training = import_step(CLIPPED)
    find_gradients(training)

    inspection = inspect_graph(training, {node.name: 10 for node in training.graph.nodes})

    assert [part.flops for part in inspection.parts] == [10 * part.nodes for part in inspection.parts]


def test_a_loss_divided_by_a_label_count_is_warned_of() -> None:
    assert "divides by what is summed over the samples, as a count of labels is" in shown(COUNTED)
    assert "Only --batch global is exact" in shown(COUNTED)
    assert "Only --batch global is exact" not in shown(SGD)
