"""Write schemas for numbers, and check which constants llguidance can write exactly."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction
from typing import Any

from .shapes import MAX_NUMBER, Number, exact, is_known_step

MAX_WHOLE = 2**53 - 1  # the largest integer that JavaScript numbers represent exactly
MAX_BOUND = 10**15  # limit for numbers with decimals, in both directions
MAX_DECIMALS = 10
_MAX_DIGITS_READ = 15  # decimal digits that a double always represents exactly
_MAX_DECIMALS_READ = 22  # exponent of the largest power of ten that a double represents exactly
_ESCAPED = frozenset("\n\r\t\b\f")

Written = dict[str, Any]


def is_writable(text: str) -> bool:
    r"""Return whether a string can be written without `\u` escapes. With escapes, a key would have two spellings."""
    return all((char >= " " and char != "\x7f") or char in _ESCAPED for char in text)


def number_of(form: Number) -> Written | None:
    """Return a schema for numbers of this form with a limited number of digits, or None if no double matches the form.

    llguidance can't limit the number of digits, so bounds and multipleOf limit them instead.
    """
    if form.values is not None:
        values = [value for each in form.values if (value := constant_of(each)) is not None]
        return {"enum": values} if values else None
    if form.is_integer or (form.step is not None and form.step.denominator == 1):
        return _integer(form)
    low, high, step = form.minimum, form.maximum, form.step
    ends = [abs(each) for each in (low, high) if each is not None]
    if low is None or low < -MAX_BOUND:
        low, low_open = (-MAX_BOUND if high is None or high > -MAX_BOUND else -MAX_NUMBER), False
    else:
        low_open = form.is_above_minimum
    if high is None or high > MAX_BOUND:
        high, high_open = (MAX_BOUND if low < MAX_BOUND else MAX_NUMBER), False
    else:
        high_open = form.is_below_maximum
    if low == 0 and low_open:  # llguidance treats -0 as a number below 0
        low, low_open = float(step or Fraction(1, 10**MAX_DECIMALS)), False
    if high == 0 and high_open:
        high, high_open = -float(step or Fraction(1, 10**MAX_DECIMALS)), False
    decimals = MAX_DECIMALS
    if form.is_above_minimum or form.is_below_maximum:  # readers must not round a value to an excluded bound
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


def _integer(form: Number) -> Written | None:
    step = 1 if form.step is None else form.step
    step = step if isinstance(step, int) else Fraction(math.lcm(step.numerator, step.denominator), step.denominator)
    low = -MAX_WHOLE if form.minimum is None else math.ceil(form.minimum)
    high = MAX_WHOLE if form.maximum is None else math.floor(form.maximum)
    low += form.is_above_minimum and low == form.minimum
    high -= form.is_below_maximum and high == form.maximum
    if form.minimum is None and high < low:
        low = -MAX_NUMBER
    if form.maximum is None and high < low:
        high = MAX_NUMBER
    low, high = _inward(max(low, -MAX_NUMBER), math.inf), _inward(min(high, MAX_NUMBER), -math.inf)
    if low > high or not is_known_step(Fraction(step)) or -(-low // step) > high // step:
        return None
    return {"type": "integer", "minimum": low, "maximum": high, **({"multipleOf": int(step)} if step != 1 else {})}


def _inward(value: int, towards: float) -> int:
    """Return the nearest integer in this direction that a double can represent."""
    near = float(value)
    if near != value and (near < value) == (towards > 0):
        near = math.nextafter(near, towards)
    return int(near)


def _has_multiple(low: float, low_open: bool, high: float, high_open: bool, step: Fraction) -> bool:
    """Return whether there is a multiple of `step` between these bounds."""
    first, last = math.ceil(exact(low) / step), math.floor(exact(high) / step)
    first += low_open and first * step == exact(low)
    last -= high_open and last * step == exact(high)
    return first <= last


def constant_of(value: float) -> float | None:
    """Return the number, or None if the number can't be written exactly in JSON without an exponent."""
    if isinstance(value, int) or value == int(value):
        whole = int(value)
        return whole if abs(whole) <= MAX_NUMBER and int(float(whole)) == whole else None
    return value if _is_read_exactly(value) else None


def _is_read_exactly(value: float) -> bool:
    """Return whether llguidance, which divides the digits by a power of ten, parses a number as the same double."""
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    return int("".join(map(str, digits))) <= 2**53 and -_MAX_DECIMALS_READ <= int(exponent) <= _MAX_DECIMALS_READ


def _rounded(bound: float, rounding: str) -> float:
    """Return a bound that llguidance parses exactly, rounded inward if necessary."""
    if isinstance(bound, int) or _is_read_exactly(bound):
        return bound
    near = Decimal(repr(bound))
    exponent = max(near.adjusted() - _MAX_DIGITS_READ + 1, -_MAX_DECIMALS_READ)
    return float(near.quantize(Decimal(1).scaleb(exponent), rounding=rounding))
