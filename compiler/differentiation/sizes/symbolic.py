"""Arithmetic of sizes, some of which are symbols: 6, "batch", "20*batch"; None is unknown.

A symbolic size is a product of a number and of symbols, each of which stands for a size: a whole number
that is not negative. What is no such product is unknown here; who asks may give it a symbol of its own.
"""

from collections import Counter

from partc.compiler.differentiation.tensor_types import Size

Product = tuple[int, Counter[str]]


def multiply(a: Size, b: Size) -> Size:
    """Return a b."""
    if a == 0 or b == 0:
        return 0
    if a is None or b is None:
        return None
    (m, left), (n, right) = _factors(a), _factors(b)
    return _spell(m * n, left + right)


def divide(a: Size, b: Size) -> Size:
    """Return a / b where b divides a, or where both are numbers: ONNX rounds towards 0."""
    if a is None or b is None or b == 0:
        return None
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    (m, left), (n, right) = _factors(a), _factors(b)
    if n == 0 or m % n or right - left:
        return None
    return _spell(m // n, left - right)


def add(a: Size, b: Size) -> Size:
    """Return a + b."""
    if a is None or b is None:
        return None
    (m, left), (n, right) = _factors(a), _factors(b)
    if m == 0 or n == 0:
        return b if m == 0 else a
    return _spell(m + n, left) if left == right else None


def subtract(a: Size, b: Size) -> Size:
    """Return a - b; a symbolic difference that may be negative is unknown."""
    if a is None or b is None:
        return None
    (m, left), (n, right) = _factors(a), _factors(b)
    if left != right and n != 0:
        return None
    return _spell(m - n, left) if not left or m >= n else None


def largest(a: Size, b: Size) -> Size:
    """Return the larger."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    low, high = is_less(a, b), is_less(b, a)
    if a == b or high or low is False:
        return a
    return b if low or high is False else None


def smallest(a: Size, b: Size) -> Size:
    """Return the smaller."""
    most = largest(a, b)
    if most is None:
        return None
    return b if most == a else a


def is_equal(a: Size, b: Size) -> bool | None:
    """Tell whether two sizes are equal, None if nobody knows."""
    if a is None or b is None:
        return None
    if a == b:
        return True
    if (isinstance(a, int) and isinstance(b, int)) or is_less(a, b) or is_less(b, a):
        return False
    return None


def is_less(a: Size, b: Size) -> bool | None:
    """Tell whether a < b, None if nobody knows: a symbol may be 0 and has no upper bound."""
    if a is None or b is None:
        return None
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    if a == b or (isinstance(b, int) and b <= 0):
        return False
    return True if isinstance(a, int) and a < 0 else None


def _factors(size: int | str) -> Product:
    if isinstance(size, int):
        return size, Counter()
    number, symbols = 1, Counter[str]()
    for factor in size.split("*"):
        if factor.isdigit():
            number *= int(factor)
        else:
            symbols[factor] += 1
    return number, symbols


def _spell(number: int, symbols: Counter[str]) -> Size:
    if number == 0 or not symbols:
        return number
    if number < 0:
        return None
    return "*".join([str(number)] * (number != 1) + sorted(symbols.elements()))
