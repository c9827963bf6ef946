"""Hold what a user gives a record against the types that its fields declare."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from partc.runtime.errors import BadUsage


def check_types(config: object, at: str) -> None:
    """Hold a record's fields against their types. Raises BadUsage."""
    assert is_dataclass(config) and not isinstance(config, type)
    hints = get_type_hints(type(config))
    for entry in fields(config):
        value = getattr(config, entry.name)
        if not _fits(value, hints[entry.name]):
            raise BadUsage(
                f"{value!r} ({type(value).__name__})",
                at=f"{at}.{entry.name}",
                fix=f"give {_words(hints[entry.name])}",
            )


def _fits(value: object, hint: Any) -> bool:  # a type of any form
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return any(_fits(value, each) for each in arguments)
    if origin is tuple or origin is Sequence:
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and all(_fits(each, arguments[0]) for each in value)
        )
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(key, arguments[0]) and _fits(each, arguments[1]) for key, each in value.items()
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:  # a type of any form
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return " or ".join(_words(each) for each in arguments)
    if origin is Mapping:
        return f"a mapping of {_words(arguments[0])} to {_words(arguments[1])}"
    if origin is not None:
        return f"a sequence of {_words(arguments[0])}"
    return "None" if hint is NoneType else str(hint.__name__)
