"""Hold arguments of public functions against their annotations, so that a wrong one is told in three parts.

Lists and mappings are looked into; what can be read once, as a generator, is not. Dataclasses of partc's own
are held against their fields. What an annotation cannot tell, the functions check themselves.

Where an annotation wants numbers, functions and records are given Python's own: NumPy's are numbers, too, but
are not written as JSON, in which jobs and plans are.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from partc.runtime.callers_code import raised_by_caller
from partc.runtime.errors import BadUsage, one_of, one_tree

Given = ParamSpec("Given")
Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=type)
_MOST_SHOWN = 60  # characters of a value


def public(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Return a function from which nothing but PartcErrors come, and what its caller's own code raises."""
    call: Callable[..., Result] = function

    @wraps(function)
    def checked(*positional: Given.args, **named: Given.kwargs) -> Result:
        bound = check_call(function, positional, named)
        with one_tree(raised_by_caller):
            return call(*bound.args, **bound.kwargs)

    return checked


def public_record(kind: Kind) -> Kind:
    """Return a dataclass that takes its arguments as public functions do; who uses it checks their types."""
    constructor: Callable[..., None] = kind.__init__  # type: ignore[misc]  # of the class, which has no subclasses

    @wraps(constructor)
    def checked(self: object, *positional: object, **named: object) -> None:
        bound, hints = _bind(constructor, (self, *positional), named, kind.__name__), _hints(kind)
        for name in bound.arguments.keys() & hints.keys():
            bound.arguments[name] = _with_own_numbers(bound.arguments[name], hints[name])
        constructor(*bound.args, **bound.kwargs)

    kind.__init__ = checked  # type: ignore[misc]
    return kind


def check_call(
    function: Callable[..., object], positional: tuple[object, ...], named: dict[str, Any]
) -> inspect.BoundArguments:
    """Return a call's arguments, with Python's own numbers.

    Raises BadUsage where the call does not fit the function's signature and annotations.
    """
    name = function.__qualname__.rpartition("<locals>.")[2].removesuffix(".__init__")
    signature, hints = inspect.signature(function), _hints(function)
    bound = _bind(function, positional, named, name)
    for argument, value in bound.arguments.items():
        kind = signature.parameters[argument].kind
        if argument in hints and kind not in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        ):
            _check(value, hints[argument], f"{name}({argument}=...)")
            bound.arguments[argument] = _with_own_numbers(value, hints[argument])
    return bound


def _bind(
    function: Callable[..., object], positional: tuple[object, ...], named: Mapping[str, object], name: str
) -> inspect.BoundArguments:
    """Return a call's arguments. Raises BadUsage where the function does not take them."""
    signature = inspect.signature(function)
    try:
        return signature.bind(*positional, **named)
    except TypeError as error:
        raise _not_bound(signature, named, name, str(error)) from None


def check_fields(record: object) -> None:
    """Raise BadUsage where a dataclass has a field of another type than it declares."""
    assert is_dataclass(record) and not isinstance(record, type)
    for field in fields(record):
        _check_field(record, field.name)


def settle_fields(record: msgspec.Struct) -> None:
    """Give a structure's fields Python's own numbers. Raises BadUsage where one is of another type."""
    for name in record.__struct_fields__:
        _check_field(record, name)
        value = _with_own_numbers(getattr(record, name), _hints(type(record))[name])
        msgspec.structs.force_setattr(record, name, value)


def _check_field(record: object, name: str) -> None:
    kind: Any = type(record)
    _check(getattr(record, name), _hints(kind)[name], f"{kind.__name__}.{name}")


def _not_bound(
    signature: inspect.Signature, named: Mapping[str, object], name: str, message: str
) -> BadUsage:
    by_name = [
        p.name
        for p in signature.parameters.values()
        if p.kind is not inspect.Parameter.POSITIONAL_ONLY and p.name != "self"
    ]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    unknown = [key for key in named if key not in by_name and not takes_any]
    if unknown:
        return BadUsage(f"no argument {unknown[0]!r}", at=f"{name}()", fix=one_of(by_name, unknown[0]))
    return BadUsage(message, at=f"{name}()", fix=f"call {name}{_shown(signature)}")


def _shown(signature: inspect.Signature) -> str:
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = [p for p in signature.parameters.values() if p.kind not in any_number and p.name != "self"]
    required = [p for p in own if p.default is p.empty]
    named = [f"{p.name}=..." if p.kind is p.KEYWORD_ONLY else p.name for p in required]
    return f"({', '.join(named or [f'{p.name}=...' for p in own[:1]])})"


@cache
def _hints(annotated: Any) -> dict[str, Any]:
    try:
        return get_type_hints(annotated)
    except NameError:  # types of a library that is imported when it is needed
        return {}


def _check(value: object, hint: Any, at: str) -> None:
    """Raise BadUsage where a value is not of a type."""
    if not _fits(value, hint):
        value, hint, at = _misfit(value, hint, at)
        text = repr(value)
        text = text if len(text) <= _MOST_SHOWN and "\n" not in text else f"a {type(value).__name__}"
        choices = _choices(hint)
        fix = one_of(choices, value) if choices and isinstance(value, str) else f"give {_told(hint)}"
        raise BadUsage(f"{text} is not {_told(hint)}", at=at, fix=fix)
    if is_dataclass(value) and type(value).__module__.startswith("partc."):
        kind: Any = type(value)
        hints = _hints(kind)
        for field in fields(value):
            _check(
                getattr(value, field.name), hints[field.name], f"{at}: {type(value).__name__}.{field.name}"
            )


def _fits(value: object, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar) or hint is object:
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return any(value is one or (type(value) is type(one) and value == one) for one in inner)
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and (hint is bool or not isinstance(value, bool))
    if origin is not None:
        return _fits_container(value, origin, inner)
    try:
        return isinstance(value, hint)
    except TypeError:  # a protocol: whoever calls it will see
        return True


def _misfit(value: object, hint: Any, at: str) -> tuple[object, Any, str]:
    """Return what is not of its type, its type and its place: a part of a container, if that is at fault."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    containers = [parts for kind in kinds if (parts := list(_parts(value, kind)))]
    for part, of, place in containers[0] if len(containers) == 1 else ():
        if not _fits(part, of):
            return _misfit(part, of, at + place)
    return value, hint, at


def _parts(value: object, kind: Any) -> Iterator[tuple[object, Any, str]]:
    """Yield a container's parts, where it may be of a kind: each with its type and place.

    A tuple whose members have types of their own is told as a whole.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(value, Mapping) and len(inner) == 2 and _is_of(value, origin):
        for key, part in value.items():
            yield key, inner[0], f", key {key!r:.{_MOST_SHOWN}}"
            yield part, inner[1], f"[{key!r:.{_MOST_SHOWN}}]"
    elif isinstance(value, list | tuple) and origin in _KINDS and inner[1:] in ((), (Ellipsis,)):
        yield from ((part, inner[0], f"[{place}]") for place, part in enumerate(value))


def _is_of(value: object, origin: object) -> bool:
    return isinstance(origin, type) and isinstance(value, origin)


def _fits_container(value: object, origin: Any, inner: tuple[Any, ...]) -> bool:
    """Tell whether a value is a container, or a function, and whether what can be looked at in it fits."""
    if origin is Callable:
        return callable(value)
    if origin is tuple:  # lists do as well
        return isinstance(value, list | tuple) and _fits_each(value, inner)
    if not isinstance(value, origin):
        return False
    if isinstance(value, Mapping) and len(inner) == 2:
        return all(_fits(key, inner[0]) and _fits(one, inner[1]) for key, one in value.items())
    if (
        isinstance(value, Collection)
        and not isinstance(value, str | Mapping)
        and issubclass(origin, Iterable)
    ):
        return len(inner) != 1 or all(_fits(one, inner[0]) for one in value)
    return not isinstance(value, str) or inner in ((str,), ())


def _fits_each(value: Sequence[object], inner: tuple[Any, ...]) -> bool:
    """Tell whether a tuple's members are of its types: of one, where an ellipsis follows that."""
    kinds = _kinds_of(value, inner)
    return len(value) == len(kinds) and all(map(_fits, value, kinds))


def _kinds_of(value: Sequence[object], inner: tuple[Any, ...]) -> tuple[Any, ...]:
    return inner[:1] * len(value) if inner[1:] == (Ellipsis,) else inner


def _with_own_numbers(value: Any, hint: Any) -> Any:
    """Return a value with Python's own numbers where its type wants numbers; itself if it is of another."""
    origin, inner = get_origin(hint), get_args(hint)
    if not _wants_numbers(hint) or not _fits(value, hint):
        return value
    if origin in (Union, UnionType):
        return _with_own_numbers(value, next(one for one in inner if _fits(value, one)))
    if origin is None:
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Mapping) and len(inner) == 2:
        return {
            _with_own_numbers(key, inner[0]): _with_own_numbers(one, inner[1]) for key, one in value.items()
        }
    if origin is tuple:
        return tuple(map(_with_own_numbers, value, _kinds_of(value, inner)))
    if isinstance(value, Collection) and len(inner) == 1:
        kind = origin if origin in (list, set, frozenset) else tuple
        return kind(_with_own_numbers(one, inner[0]) for one in value)
    return value


def _wants_numbers(hint: Any) -> bool:
    return hint in (int, float) or any(map(_wants_numbers, get_args(hint)))


_NUMBERS: dict[Any, Any] = {bool: bool, int: Integral, float: Real}
_KINDS: dict[Any, str] = {
    Iterable: "an iterable",
    Collection: "a collection",
    Sequence: "a sequence",
    list: "a list",
    tuple: "a tuple",
}
_WORDS: dict[Any, str] = {
    str: "text",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    Path: "a Path",
    np.ndarray: "an array",
    np.generic: "a scalar of NumPy's",
}


def _choices(hint: Any) -> list[str]:
    """Return the words that a type consists of; none if other values are of it, too, but None."""
    if get_origin(hint) is Literal:
        return [one for one in get_args(hint) if isinstance(one, str) and one]
    kinds = [one for one in get_args(hint) if one is not type(None)]
    is_one = get_origin(hint) in (Union, UnionType) and len(kinds) == 1
    return _choices(kinds[0]) if is_one else []


def _told(hint: Any) -> str:
    """Say what a type is, in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is None or hint is type(None):
        return "None"
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_told, inner)))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is Callable:
        return "a function"
    if origin is not None and issubclass(origin, Mapping):
        return f"a mapping of {_told(inner[0])} to {_told(inner[1])}"
    if origin in _KINDS:
        return f"{_KINDS[origin]} of {' and '.join(_told(one) for one in inner if one is not Ellipsis)}"
    named = getattr(origin or hint, "__name__", str(hint))
    return _WORDS.get(origin or hint) or ("an " if named[0] in "aeiouAEO" else "a ") + named
