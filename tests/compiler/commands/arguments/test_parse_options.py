from collections.abc import Callable
from pathlib import Path

import pytest

from partc.compiler.commands.arguments.parse_options import (
    parse_axes,
    parse_batch_size,
    parse_endpoint,
    parse_learning_rate,
    parse_pairs,
    parse_sizes,
    parse_steps,
)
from partc.compiler.commands.arguments.parse_update_options import (
    parse_groups,
    parse_optimizer,
    parse_schedule,
)
from partc.compiler.commands.arguments.shared_arguments import graph_options
from partc.compiler.options import Options
from partc.compiler.settle_options import DEFAULT_BATCH, choose_batch, fill_sizes
from partc.cost.strategy import STRATEGY_FORMAT, Strategy, encode_strategy
from partc.runtime.errors import BadStrategy, BadUsage
from tests.builders.graphs.foreign_steps import SGD, import_step

GLOBAL = Strategy(STRATEGY_FORMAT, "global", {})


def test_texts_become_values() -> None:
    assert parse_pairs("W=W_next,b=b_next", "--state") == {"W": "W_next", "b": "b_next"}
    assert parse_pairs("", "--state") is None
    assert parse_axes(["x=0", "h=1", "lr=none"]) == {"x": 0, "h": 1, "lr": None}
    assert parse_sizes(["batch=16", "words=8"]) == {"batch": 16, "words": 8}
    assert [parse_batch_size(text) for text in ("", "8", "dynamic")] == [None, 8, "dynamic"]
    assert [parse_learning_rate(text) for text in ("0.5", "1e-3", "fed")] == [0.5, 1e-3, "fed"]


@pytest.mark.parametrize(
    ("parse", "said"),
    [
        (lambda: parse_pairs("W=a,W=b", "--state"), "--state says two things of W: a and b"),
        (lambda: parse_axes(["x=0", "x=1"]), "--sample-axis says two things of x: 0 and 1"),
        (lambda: parse_sizes(["batch=4", "batch=8"]), "--size says two things of batch: 4 and 8"),
        (lambda: parse_schedule("step:every=3,every=5,factor=0.1"), "--schedule says two things of every"),
        (lambda: parse_groups("", ["*.bias:lr=1,lr=2"]), r"--group \*\.bias says two things of lr"),
        (
            lambda: parse_optimizer("adam", "", ["beta1=0.8", "beta1=0.9"], None),
            "--set-optimizer says two things of beta1",
        ),
    ],
)
def test_one_option_does_not_say_two_things_of_a_name(parse: Callable[[], object], said: str) -> None:
    with pytest.raises(BadUsage, match=rf"{said}.*\n  at:  --.*\n  fix: name \w+ once"):
        parse()


def test_an_option_of_pairs_may_be_given_several_times() -> None:
    assert graph_options(["W=W_next", "b=b_next,c=c_next"], [], "", None).state == {
        "W": "W_next",
        "b": "b_next",
        "c": "c_next",
    }
    assert graph_options([], [], "", None).state is None


def test_what_is_said_twice_alike_is_said_once() -> None:
    assert parse_sizes(["batch=4", "batch=4"]) == {"batch": 4}


def test_steps_are_the_last_ones_or_ranges() -> None:
    assert parse_steps("3", "--trace-steps") == 3
    assert parse_steps("100-105,500", "--trace-steps") == ((100, 105), (500, 500))
    assert parse_steps("7-7", "--trace-steps") == ((7, 7),)


@pytest.mark.parametrize("text", ["", "0", "0-3", "3-1", "a", "1-", "1,,2", "-3"])
def test_what_are_no_steps_is_refused(text: str) -> None:
    with pytest.raises(
        BadUsage, match=r"at:  --trace-steps\n  fix: write --trace-steps 100-105,500 for these"
    ):
        parse_steps(text, "--trace-steps")


def test_a_port_is_this_machines_own_unless_an_address_is_given() -> None:
    assert parse_endpoint("", "--metrics-port") is None
    assert parse_endpoint("9400", "--metrics-port") == ("127.0.0.1", 9400)
    assert parse_endpoint("0.0.0.0:9400", "--metrics-port") == ("0.0.0.0", 9400)
    assert parse_endpoint("[::1]:0", "--metrics-port") == ("::1", 0)


@pytest.mark.parametrize("text", ["x", "70000", "host:", "-1"])
def test_what_is_no_port_is_refused(text: str) -> None:
    with pytest.raises(BadUsage, match=r"fix: write --metrics-port 9400, or 0\.0\.0\.0:9400"):
        parse_endpoint(text, "--metrics-port")


@pytest.mark.parametrize("text", ["W", "W=", "=W_next", "W=W_next,", "W=W_next,b"])
def test_what_is_no_pair_is_refused(text: str) -> None:
    with pytest.raises(BadUsage, match=r"at:  --state\n  fix: write --state W=W_next"):
        parse_pairs(text, "--state")


@pytest.mark.parametrize("text", ["x", "x=", "=0", "x=-1", "x=first", "x=0.5"])
def test_what_is_no_axis_is_refused(text: str) -> None:
    with pytest.raises(BadUsage, match=r"fix: write x=0 \(axes count from 0\), or rate=none"):
        parse_axes([text])


@pytest.mark.parametrize("text", ["batch", "batch=", "=4", "batch=0", "batch=-4", "batch=many"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(BadUsage, match="fix: write --size batch=16"):
        parse_sizes([text])


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_what_is_no_batch_size_is_refused(text: str) -> None:
    with pytest.raises(BadUsage, match="fix: give a number, or 'dynamic'"):
        parse_batch_size(text)


@pytest.mark.parametrize("text", ["0", "-0.1", "nan", "inf", "fast", ""])
def test_what_is_no_learning_rate_is_refused(text: str) -> None:
    with pytest.raises(BadUsage, match="is not a positive number"):
        parse_learning_rate(text)


@pytest.mark.parametrize("text", ["1e-50", "1e40"])
def test_a_learning_rate_that_float32_does_not_hold_is_refused(text: str) -> None:
    with pytest.raises(BadUsage, match=r"as a float32, which steps compute with\n  at:  --lr"):
        parse_learning_rate(text)


def test_symbolic_sizes_without_a_value_get_the_default() -> None:
    graph = import_step(SGD.replace("[8,", "[batch,"))

    assert fill_sizes({}, graph) == {"batch": DEFAULT_BATCH}
    assert fill_sizes({"batch": 32}, graph) == {"batch": 32}
    with pytest.raises(BadUsage, match=r"no symbolic size 'hour'\n.*\n  fix: use 'batch'$"):
        fill_sizes({"hour": 3}, graph)


def test_a_strategy_is_a_mode_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_bytes(encode_strategy(GLOBAL))

    assert Options(strategy="ps").chosen_strategy() == "ps"
    assert Options(strategy=str(tmp_path / "s.json")).chosen_strategy() == GLOBAL
    with pytest.raises(
        BadUsage,
        match=r"use one of auto, .*, data, replicas, spatial, tensor, .*, one-weird-trick, or the path",
    ):
        Options(strategy="fast").chosen_strategy()


def test_the_batch_reading_comes_from_the_option_or_the_file_and_they_must_agree() -> None:
    assert choose_batch(None, "auto") is None
    assert choose_batch("global", "auto") == "global"
    assert choose_batch(None, GLOBAL) == "global"
    assert choose_batch("global", GLOBAL) == "global"
    with pytest.raises(BadStrategy, match="leave --batch out"):
        choose_batch("per-replica", GLOBAL)
