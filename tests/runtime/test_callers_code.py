import pytest

from partc.runtime.callers_code import CallersBatches, callers_code, callers_function, raised_by_caller


@pytest.mark.parametrize("error", [ValueError("mine"), OSError(2, "none", "file")])
def test_what_a_caller_raises_is_known_from_the_rest(error: Exception) -> None:
    @callers_function
    def fail() -> None:
        raise error

    assert not raised_by_caller(error)
    with pytest.raises(type(error)) as caught:
        fail()

    assert caught.value is error
    assert raised_by_caller(error)


def test_batches_end_as_the_callers_do_and_go_on_behind_an_error() -> None:
    given = iter([[("a", 1)], 3, [("b", 2)]])
    batches = CallersBatches(map(dict, given))  # type: ignore[call-overload]  # 3 is no pairs

    assert next(batches) == {"a": 1}
    with pytest.raises(TypeError) as caught:
        next(batches)
    assert raised_by_caller(caught.value)
    assert list(batches) == [{"b": 2}]


def test_an_end_of_iteration_inside_is_handed_on() -> None:
    with pytest.raises(StopIteration), callers_code():
        next(iter([]))
