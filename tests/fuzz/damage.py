"""Damage a file as disks, editors, exporters and people do. All of it is drawn from a seeded generator.

bytes       bits flipped, a piece cut out, doubled or overwritten, the end lost
protobuf    a field of some message set, cleared, or copied from another message of its type
JSON        a value replaced, a key dropped, renamed or added, an element dropped or doubled
npz         a member dropped, renamed, reshaped, of another type, with other numbers, or a bomb
"""

import io
import json
import random
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

INTEGERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    1 << 20,
    (1 << 31) - 1,
    1 << 31,
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
    -(1 << 63),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "x", "..", "../secret.txt", "/etc/passwd", "a/b", "é", "\x00", "MatMul", "W", "loss", "ai.onnx")
# JSON values that are no tree of keys; Any: a JSON value is anything
JSON_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    *INTEGERS,
    *FLOATS[:6],
    *TEXTS,
    [],
    {},
    [1, 2],
    {"x": 1},
    ["x"],
)


def damage_bytes(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes with one to three damages."""
    for _ in range(draw.randint(1, 3)):
        if not data:
            return b"\x00"
        start = draw.randrange(len(data))
        stop = min(len(data), start + draw.choice((1, 2, 8, 64, 1024)))
        match draw.randrange(6):
            case 0:
                data = data[:start] + bytes([data[start] ^ (1 << draw.randrange(8))]) + data[start + 1 :]
            case 1:
                data = data[:start] + draw.randbytes(stop - start) + data[stop:]
            case 2:
                data = data[:start] + data[stop:]
            case 3:
                data = data[:stop] + data[start:]
            case 4:
                data = data[:start] + b"\xff" * (stop - start) + data[stop:]
            case _:
                data = data[:start]
    return data


# ---------------------------------------------------------------- protobuf


def damage_model(model: onnx.ModelProto, draw: random.Random) -> bytes:
    """Return the model with a field or two changed."""
    damaged = onnx.ModelProto()
    damaged.CopyFrom(model)
    for _ in range(draw.choice((1, 1, 1, 2))):
        messages = _messages(damaged)
        # Of each kind equally often: a model has hundreds of nodes, and one graph.
        kind = draw.choice(sorted({message.DESCRIPTOR.name for message in messages}))
        _damage_message(draw.choice([m for m in messages if m.DESCRIPTOR.name == kind]), messages, draw)
    return bytes(damaged.SerializeToString())


def _messages(root: Message) -> list[Message]:
    found = [root]
    for field, value in root.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for message in value if _is_repeated(field) else [value]:
                found += _messages(message)
    return found


def _is_repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


def _damage_message(message: Message, others: list[Message], draw: random.Random) -> None:
    present = [field for field, _ in message.ListFields()]
    field = draw.choice(present if present and draw.random() < 0.8 else list(message.DESCRIPTOR.fields))
    if draw.random() < 0.15:
        message.ClearField(field.name)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        _damage_child(message, field, others, draw)
    elif _is_repeated(field):
        _damage_list(getattr(message, field.name), field, draw)
    else:
        setattr(message, field.name, _scalar(field, draw))


def _damage_child(
    message: Message, field: FieldDescriptor, others: list[Message], draw: random.Random
) -> None:
    donors = [other for other in others if field.message_type == other.DESCRIPTOR]
    donor = type(donors[0])() if donors else None
    if donor is not None and draw.random() < 0.9:
        donor.CopyFrom(draw.choice(donors))
    if not _is_repeated(field):
        if donor is None:
            getattr(message, field.name).SetInParent()
        else:
            getattr(message, field.name).CopyFrom(donor)
        return
    children = getattr(message, field.name)
    if children and draw.random() < 0.6:
        del children[draw.randrange(len(children))]
    elif donor is not None:
        children.append(donor)


def _damage_list(values: Any, field: FieldDescriptor, draw: random.Random) -> None:  # a protobuf container
    action = draw.randrange(4)
    if values and action == 0:
        del values[draw.randrange(len(values))]
    elif values and action == 1:
        values[draw.randrange(len(values))] = _scalar(field, draw)
    elif values and action == 2:
        values[draw.randrange(len(values))] = values[draw.randrange(len(values))]
    else:
        values.append(_scalar(field, draw))


def _scalar(field: FieldDescriptor, draw: random.Random) -> int | float | str | bytes:
    if field.type == FieldDescriptor.TYPE_STRING:
        return draw.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw.randbytes(draw.choice((0, 1, 4, 16, 100)))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return draw.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return draw.choice([number.number for number in field.enum_type.values])
    bits = 32 if field.type in (FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_UINT32) else 64
    unsigned = field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64)
    low, high = (0, 2**bits) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return draw.choice([number for number in (*INTEGERS, *range(12)) if low <= number < high])


# ---------------------------------------------------------------- JSON


def damage_json(data: bytes, draw: random.Random) -> bytes:
    """Return the JSON with one to three values changed; now and then its bytes instead."""
    if draw.random() < 0.1:
        return damage_bytes(data, draw)
    tree = json.loads(data)
    for _ in range(draw.randint(1, 3)):
        places = _places(tree)
        if not places:
            break
        # Of each key equally often: a plan has hundreds of instructions, and one format.
        name = draw.choice(sorted({_key_of(path) for path in places}))
        path = draw.choice([path for path in places if _key_of(path) == name])
        _damage_value(tree, path, draw)
    return json.dumps(tree).encode()


Path = tuple[str | int, ...]


def _key_of(path: Path) -> str:
    return next((key for key in reversed(path) if isinstance(key, str)), "")


def _places(tree: Any, at: Path = ()) -> list[Path]:  # a JSON value
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found: list[Path] = []
    for key, value in children:
        found.append((*at, key))
        found += _places(value, (*at, key))
    return found


def _damage_value(tree: Any, path: Path, draw: random.Random) -> None:  # a JSON value
    *front, last = path
    for key in front:
        tree = tree[key]
    value = tree[last]
    match draw.randrange(6):
        case 0:
            del tree[last]
        case 1 if isinstance(tree, list):
            tree.insert(int(last), value)
        case 1 if isinstance(last, str):
            tree[draw.choice((*TEXTS, last + "x"))] = tree.pop(last)
        case 2 if isinstance(value, list) and value:
            draw.shuffle(value)
        case 3 if isinstance(value, int) and not isinstance(value, bool):
            tree[last] = value + draw.choice((-1, 1))
        case 4 if isinstance(tree, list) and len(tree) > 1:
            tree[last] = draw.choice(tree)
        case _:
            tree[last] = draw.choice(JSON_VALUES)


# ---------------------------------------------------------------- npz

_DTYPES = ("float32", "float64", "int64", "int32", "bool", "complex64", "uint8", "U3", "M8[s]")


def damage_npz(data: bytes, draw: random.Random) -> bytes:
    """Return the archive with one member changed; now and then its bytes instead."""
    if draw.random() < 0.2:
        return damage_bytes(data, draw)
    with np.load(io.BytesIO(data)) as arrays:
        members = {name: arrays[name] for name in arrays.files}
    name = draw.choice(sorted(members))
    changes: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
        lambda array: array[: draw.randrange(len(array) + 1)] if array.ndim else array[None],
        lambda array: np.ascontiguousarray(array.T),
        lambda array: array[None],
        lambda array: array.astype(draw.choice(_DTYPES)),
        lambda array: _with_number(array, draw),
        lambda array: np.zeros((0, *array.shape[1:]), array.dtype),
    )
    action = draw.randrange(len(changes) + 4)
    if action < len(changes):
        members[name] = changes[action](members[name])
    elif action == len(changes):
        del members[name]
    elif action == len(changes) + 1:
        members[draw.choice((*TEXTS[1:], name + "x"))] = members.pop(name)
    elif action == len(changes) + 2:
        return _bomb(members, name)
    else:
        return _with_lying_header(members, name, draw)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **members)
    return file.getvalue()


def _with_number(array: np.ndarray, draw: random.Random) -> np.ndarray:
    changed = array.copy()
    if changed.size:
        number = draw.choice((-1, -100, 1 << 20, 1 << 31) if array.dtype.kind in "iu" else FLOATS)
        changed.reshape(-1)[draw.randrange(changed.size)] = number
    return changed


def _bomb(members: dict[str, np.ndarray], name: str) -> bytes:
    """Return an archive of a few megabytes with a member of about 3 GB, all zeros."""
    array = members[name]
    row = array[:1].nbytes if array.ndim else array.nbytes
    count = 3 * 10**9 // max(row, 1)
    shape = (count, *array.shape[1:]) if array.ndim else (count,)
    head = io.BytesIO()
    fields = {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(head, fields)
    return _archive(members, name, head.getvalue(), count * row)


def _with_lying_header(members: dict[str, np.ndarray], name: str, draw: random.Random) -> bytes:
    """Return an archive with a member whose header names another shape or type than its bytes hold."""
    array, head = members[name], io.BytesIO()
    shape = list(array.shape) or [1]
    shape[draw.randrange(len(shape))] = draw.choice((-1, 0, 1 << 20, 1 << 40, 1 << 62))
    descr = draw.choice((array.dtype.str, "|O", "<f2", "<f4"))
    np.lib.format.write_array_header_1_0(
        head, {"descr": descr, "fortran_order": False, "shape": tuple(shape)}
    )
    return _archive(members, name, head.getvalue() + array.tobytes(), 0)


def _archive(members: dict[str, np.ndarray], name: str, first: bytes, zeros: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for other, array in members.items():
            with archive.open(f"{other}.npy", "w", force_zip64=True) as stream:
                if other != name:
                    np.lib.format.write_array(stream, array, allow_pickle=False)
                    continue
                stream.write(first)
                for start in range(0, zeros, 1 << 24):
                    stream.write(bytes(min(1 << 24, zeros - start)))
    return file.getvalue()
