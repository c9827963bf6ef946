import pytest

from partc.models.catalogue import (
    MODELS,
    ModelRequestError,
    ParameterCount,
    build_model,
    count_parameters,
    describe_options,
    parse_options,
)
from tests.builders.graphs.forward_models import parameter_sizes


@pytest.mark.parametrize("name", MODELS)
def test_every_model_builds_and_describes_all_its_options(name: str) -> None:
    model = build_model(name)

    assert model.graph.name == name
    assert MODELS[name].description
    assert all(option.description for option in describe_options(name))


def test_options_may_be_text() -> None:
    model = build_model("mlp", **parse_options(["sizes=3,4,2", "dtype=float64", "batch=8"]))

    assert sum(parameter_sizes(model).values()) == 3 * 4 + 4 + 4 * 2 + 2


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"colour": "red"}, "colour"),
        ({"vocab": "many"}, "vocab"),
        ({"vocab": 0}, "vocab"),
        ({"dtype": "float16"}, "dtype"),
        ({"steps": "2,3"}, "steps"),
    ],
)
def test_a_bad_option_is_named_with_those_that_exist(options: dict[str, object], option: str) -> None:
    with pytest.raises(ModelRequestError, match=r"fix: options are .*vocab") as caught:
        build_model("lm", **options)

    assert option in caught.value.what
    assert caught.value.at == "options of model 'lm'"


def test_an_unknown_model_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ModelRequestError, match=r"fix: use one of .*resnet50"):
        build_model("resnet51")


@pytest.mark.parametrize("text", ["sizes", "=3", "sizes="])
def test_an_option_that_is_not_key_value_is_refused(text: str) -> None:
    with pytest.raises(ModelRequestError, match="fix: write"):
        parse_options([text])


def test_resnet50_has_no_float64_because_onnxruntime_has_no_such_convolution() -> None:
    with pytest.raises(ModelRequestError, match="dtype"):
        build_model("resnet50", dtype="float64")


def test_an_option_of_a_model_has_one_value() -> None:
    assert parse_options(["vocab=5", "vocab=5"]) == {"vocab": "5"}
    with pytest.raises(ModelRequestError, match="two values of vocab"):
        parse_options(["vocab=5", "vocab=6"])


TABLE_1 = {name: model.published for name, model in MODELS.items() if model.published}


@pytest.mark.parametrize("name", TABLE_1)
def test_a_model_has_as_many_parameters_as_the_paper_says(name: str) -> None:
    dense, sparse = (int(count) for count in TABLE_1[name].split(" + "))

    counted = count_parameters(build_model(name))

    assert round(counted.dense / 1e6) == dense
    # The LM's tables are said to have "800K" words; 814 million would be 793,471 of them.
    assert counted.sparse / 1e6 == pytest.approx(sparse, abs=0.5, rel=0.008)


def test_what_a_gather_reads_is_sparse_and_the_rest_dense() -> None:
    counted = count_parameters(build_model("lm", vocab=10, embedding=4, cells=3, projection=4))

    assert counted == ParameterCount(dense=4 * 12 + 12 + 4 * 12 + 3 * 4, sparse=2 * 10 * 4 + 10)
