"""How numbers and texts are written: which ones llguidance writes as they are meant, and within which bounds. Pure."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any

from .shapes import MAX_NUMBER, Number, exact, is_known_step

MAX_WHOLE = 2**53 - 1  # a JavaScript number holds whole numbers to there
MAX_BOUND = 10**15  # of numbers with decimals
MAX_DECIMALS = 10
_MAX_DIGITS_READ = 15  # of a double
_MAX_DECIMALS_READ = 22  # powers of ten that a double holds
_ESCAPED = frozenset("\n\r\t\b\f")

Written = dict[str, Any]


def is_writable(text: str) -> bool:
    """Strings have no `\\u` escapes: by them a key could be written in two ways."""
    return all((char >= " " and char != "\x7f") or char in _ESCAPED for char in text)


def number_of(form: Number) -> Written | None:
    """A number that a double holds and that ends: llguidance knows no bounds for digits, but multiples."""
    if form.values is not None:
        values = [value for each in form.values if (value := constant_of(each)) is not None]
        return {"enum": values} if values else None
    if form.integer or (form.step is not None and form.step.denominator == 1):
        return _whole(form)
    low, high, step = form.low, form.high, form.step
    ends = [abs(each) for each in (low, high) if each is not None]
    if low is None or low < -MAX_BOUND:
        low, low_open = (-MAX_BOUND if high is None or high > -MAX_BOUND else -MAX_NUMBER), False
    else:
        low_open = form.low_open
    if high is None or high > MAX_BOUND:
        high, high_open = (MAX_BOUND if low < MAX_BOUND else MAX_NUMBER), False
    else:
        high_open = form.high_open
    if low == 0 and low_open:  # llguidance takes -0 for a number below 0
        low, low_open = float(step or Fraction(1, 10**MAX_DECIMALS)), False
    if high == 0 and high_open:
        high, high_open = -float(step or Fraction(1, 10**MAX_DECIMALS)), False
    decimals = MAX_DECIMALS
    if form.low_open or form.high_open:  # a bound that is not allowed must not be what a value is rounded to
        decimals = max(0, min(decimals, 15 - len(str(int(max(ends, default=0))))))
    if step is None:
        step = Fraction(1, 10**decimals)
        if not _has_multiple(low, low_open, high, high_open, step):
            step = None
    elif not _has_multiple(low, low_open, high, high_open, step) or not is_known_step(step):
        return None
    low, high = _rounded(low, ROUND_CEILING), _rounded(high, ROUND_FLOOR)
    if low > high or (step is None and (low_open or high_open) and low == high):
        return None
    if step is None and low == high:
        return {"enum": [low]}
    return {
        "type": "number",
        "exclusiveMinimum" if low_open else "minimum": low,
        "exclusiveMaximum" if high_open else "maximum": high,
        **({"multipleOf": float(step)} if step is not None else {}),
    }


def _whole(form: Number) -> Written | None:
    step = 1 if form.step is None else form.step
    step = step if isinstance(step, int) else Fraction(math.lcm(step.numerator, step.denominator), step.denominator)
    low = -MAX_WHOLE if form.low is None else math.ceil(form.low)
    high = MAX_WHOLE if form.high is None else math.floor(form.high)
    low += form.low_open and low == form.low
    high -= form.high_open and high == form.high
    if form.low is None and high < low:
        low = -MAX_NUMBER
    if form.high is None and high < low:
        high = MAX_NUMBER
    low, high = _inward(max(low, -MAX_NUMBER), math.inf), _inward(min(high, MAX_NUMBER), -math.inf)
    if low > high or not is_known_step(Fraction(step)) or -(-low // step) > high // step:
        return None
    return {"type": "integer", "minimum": low, "maximum": high, **({"multipleOf": int(step)} if step != 1 else {})}


def _inward(value: int, towards: float) -> int:
    """The nearest whole number that a double holds."""
    near = float(value)
    if near != value and (near < value) == (towards > 0):
        near = math.nextafter(near, towards)
    return int(near)


def _has_multiple(low: float, low_open: bool, high: float, high_open: bool, step: Fraction) -> bool:
    first, last = math.ceil(exact(low) / step), math.floor(exact(high) / step)
    first += low_open and first * step == exact(low)
    last -= high_open and last * step == exact(high)
    return first <= last


def constant_of(value: float) -> float | None:
    """A number as it can be written without an exponent, or None."""
    if isinstance(value, int) or value == int(value):
        whole = int(value)
        return whole if abs(whole) <= MAX_NUMBER and int(float(whole)) == whole else None
    return value if _is_read_exactly(value) else None


def _is_read_exactly(value: float) -> bool:
    """Whether llguidance reads the double that was meant: it divides the digits by a power of ten."""
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    return int("".join(map(str, digits))) <= 2**53 and -_MAX_DECIMALS_READ <= int(exponent) <= _MAX_DECIMALS_READ


def _rounded(bound: float, rounding: str) -> float:
    """A bound that llguidance reads exactly, further inward if necessary."""
    if isinstance(bound, int) or _is_read_exactly(bound):
        return bound
    near = Decimal(repr(bound))
    exponent = max(near.adjusted() - _MAX_DIGITS_READ + 1, -_MAX_DECIMALS_READ)
    return float(near.quantize(Decimal(1).scaleb(exponent), rounding=rounding))
