"""The gradient rule of Einsum: exchange an operand's letters with the output's.

y = "ij,jk->ik"            da = "ik,jk->ij" (dy, b)         each letter of a is found elsewhere
y = "ij,k->k"              da[i, j] = sum_k dy[k] b[k]      a letter of a alone: spread over its axis
y = "ii->i"                da = dy on the diagonal          a letter twice: zero off the diagonal
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partc.compiler.differentiation.forward_node import (
    ForwardNode,
    Gradients,
    Rule,
    may_be_stretched,
    of_first_output,
)
from partc.compiler.differentiation.rules.along_axis import static_size
from partc.compiler.differentiation.tensor_types import Size
from partc.runtime.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class _Equation:
    """An equation whose ellipses have become letters and whose output is spelled out."""

    operands: tuple[str, ...]
    output: str


def _spell_out(text: str, ranks: Sequence[int]) -> _Equation:
    inputs, arrow, output = text.replace(" ", "").partition("->")
    operands = inputs.split(",")
    free = [letter for letter in string.ascii_letters if letter not in text]
    # An ellipsis stands for axes counted from its end, as in broadcasting.
    lengths = [
        rank - len(word) + 3 if "..." in word else 0 for word, rank in zip(operands, ranks, strict=True)
    ]
    longest = max(lengths, default=0)
    letters = "".join(free[:longest])
    explicit_operands = [
        word.replace("...", letters[longest - length :])
        for word, length in zip(operands, lengths, strict=True)
    ]
    if not arrow:
        once = sorted(letter for letter in set(inputs) - set(",.") if inputs.count(letter) == 1)
        output = "..." + "".join(once)
    return _Equation(tuple(explicit_operands), output.replace("...", letters))


def _einsum(at: ForwardNode, dy: str) -> Gradients:
    text = at.attribute("equation")
    assert isinstance(text, str)
    equation = _spell_out(text, [at.rank(x) for x in at.node.input])
    return {index: _operand_gradient(at, dy, equation, index) for index in sorted(at.gradient_inputs)}


def _operand_gradient(at: ForwardNode, dy: str, equation: _Equation, index: int) -> str:
    word, shape = equation.operands[index], at.shape(at.x(index))
    others = [other for i, other in enumerate(equation.operands) if i != index]
    inputs = [x for i, x in enumerate(at.node.input) if i != index]
    elsewhere = set(equation.output).union(*others)
    letters = "".join(dict.fromkeys(word))
    # An axis of size 1 was perhaps broadcast: its gradient is summed, then spread over 1 entry.
    common_letters = "".join(
        letter for letter in letters if letter in elsewhere and shape[word.index(letter)] != 1
    )
    terms = ",".join([equation.output, *others])
    gradient = at.op("Einsum", dy, *inputs, equation=f"{terms}->{common_letters}")
    missing = [axis for axis, letter in enumerate(letters) if letter not in common_letters]
    if missing:
        gradient = at.op("Unsqueeze", gradient, at.build.ints(*missing))
    if unsure := _perhaps_stretched(at, equation, index):
        _check_no_letter_twice(at, word)
        gradient = at.sum_where_narrow(gradient, at.x(index), unsure)
    if letters != word:
        gradient = _on_diagonal(at, gradient, word, at.x(index))
    elif any(shape[axis] != 1 for axis in missing) or _may_be_narrow(at, equation, index):
        gradient = at.op("Expand", gradient, at.shape_of(at.x(index)))
    return gradient


def _perhaps_stretched(at: ForwardNode, equation: _Equation, index: int) -> list[int]:
    """Return the axes of an operand that have size 1, and are broadcast, for all that is known of them."""
    shape = at.shape(at.x(index))
    elsewhere: dict[str, set[Size]] = {}
    for i, word in enumerate(equation.operands):
        for letter, size in zip(word, at.shape(at.x(i)), strict=True):
            if i != index:
                elsewhere.setdefault(letter, set()).add(size)
    return [
        axis
        for axis, (letter, size) in enumerate(zip(equation.operands[index], shape, strict=True))
        if any(may_be_stretched(size, other) for other in elsewhere.get(letter, ()))
    ]


def _check_no_letter_twice(at: ForwardNode, word: str) -> None:
    if len(set(word)) < len(word):
        raise UnsupportedModel(
            f"the diagonal {word!r} of an operand with unknown sizes",
            at=at.place,
            fix="export the model with these sizes fixed; only the batch may be symbolic",
        )


def _may_be_narrow(at: ForwardNode, equation: _Equation, index: int) -> bool:
    """Tell whether an axis of this operand is wider than where else its letter is read."""
    narrow = {
        letter
        for i, word in enumerate(equation.operands)
        for letter, size in zip(word, at.shape(at.x(i)), strict=True)
        if i != index and (size == 1 or not isinstance(size, int))
    }
    wide = dict(zip(equation.operands[index], at.shape(at.x(index)), strict=True))
    return any(letter in narrow and letter not in equation.output and wide[letter] != 1 for letter in wide)


def _on_diagonal(at: ForwardNode, gradient: str, word: str, x: str) -> str:
    """Give each repeated letter its axes back: zero but where the positions along them are equal."""
    letters = list(dict.fromkeys(word))
    order = letters + [letter for letter in letters for _ in range(word.count(letter) - 1)]
    new_axes = list(range(len(letters), len(order)))
    gradient = at.op("Unsqueeze", gradient, at.build.ints(*new_axes))
    for axis in new_axes:
        first = order.index(order[axis])
        size = static_size(at, x, word.index(order[axis]))
        mask_shape = [size if a in (first, axis) else 1 for a in range(len(order))]
        mask = np.eye(size, dtype=at.types[x].dtype).reshape(mask_shape)
        gradient = at.op("Mul", gradient, at.build.constant(mask))
    places = {letter: [a for a, other in enumerate(order) if other == letter] for letter in letters}
    perm = [places[letter].pop(0) for letter in word]
    gradient = at.op("Transpose", gradient, perm=perm)
    return at.op("Expand", gradient, at.shape_of(x))


RULES: Mapping[str, Rule] = {"Einsum": of_first_output(_einsum)}
