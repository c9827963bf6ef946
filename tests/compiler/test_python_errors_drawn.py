"""Public functions with arguments drawn at random: what is refused is refused in three parts."""

from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import partc
from partc.runtime.errors import InternalError, PartcError

api: Any = partc  # what callers without a type checker see
FUNCTIONS = (
    "build_model",
    "build_training_graph",
    "compile",
    "create_num_shards_and_shard_id",
    "get_partitioner",
    "get_runner",
    "inspect",
    "parallel_run",
    "search",
    "shard",
    "verify",
)
CLASSES = (
    *("Adagrad", "Momentum", "SGD", "GraphOptions", "Options", "Partitioner", "Sample", "SearchOptions"),
    *("CheckpointConfig", "CommunicationConfig", "MPIConfig", "PSConfig", "ParallaxConfig", "ProfileConfig"),
    *("SessionConfig", "Runner"),
)
NAMES = st.sampled_from(
    ["train", "cluster", "options", "strategy", "batch", "steps", "seed", "data", "nothing"]
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=True, width=32),
    st.sampled_from(["", "mlp", "no.onnx", "no.json", "auto", "\0", "no\nfile", "a" * 5000]),
    st.sampled_from([b"a", Path("nowhere"), Path("/proc/self/mem"), object(), print, int, Ellipsis]),
    st.builds(np.zeros, st.just(2)),
    st.builds(onnx.ModelProto),
    st.lists(st.integers(0, 2), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(0, 2), max_size=2),
)


def calls_of(names: tuple[str, ...]) -> Iterator[Callable[..., object]]:
    for name in names:
        yield getattr(api, name)


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    call=st.sampled_from(tuple(calls_of(FUNCTIONS))),
    by_place=st.lists(VALUES, max_size=4),
    by_name=st.dictionaries(NAMES, VALUES, max_size=2),
)
def test_wrong_calls_are_refused_in_three_parts(
    call: Callable[..., object], by_place: list[object], by_name: dict[str, object]
) -> None:
    check(lambda: call(*by_place, **by_name))


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    call=st.sampled_from(tuple(calls_of(CLASSES))),
    values=st.lists(VALUES, min_size=1, max_size=4),
    draw=st.data(),
)
def test_wrong_settings_are_refused_where_they_are_used(
    call: Callable[..., object], values: list[object], draw: st.DataObject
) -> None:
    names = [
        name for name, entry in signature(call).parameters.items() if entry.kind is not entry.VAR_KEYWORD
    ]
    fields = {draw.draw(st.sampled_from(names)): value for value in values}
    try:
        made = call(**fields)
    except TypeError:  # a record of Python's own: a field is missing
        return
    except PartcError as error:
        told(error)
        return
    check(lambda: api.inspect(MODEL, options=made))
    check(lambda: api.search(MODEL, "no.json", made))
    check(lambda: api.build_training_graph(MODEL, loss="mse", optimizer=made))
    check(lambda: api.get_runner(MODEL, "no.json", made))


MODEL = partc.build_model("mlp", sizes=(2, 2), batch=2)


def check(call: Callable[[], object]) -> None:
    try:
        call()
    except PartcError as error:
        told(error)


def told(error: PartcError) -> None:
    assert not isinstance(error, InternalError), str(error)
    assert error.what and error.at and error.fix
    assert str(error) == f"{error.what}\n  at:  {error.at}\n  fix: {error.fix}"
