"""Checks of values, each with an error that names value and remedy."""

from __future__ import annotations

import math
from typing import TypeGuard

from .errors import InvalidRequest


def check(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name} is {value!r}; it must be {wanted}")


def is_real(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def check_length(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequest(f"{name} has {len(text)} characters, and the limit is {limit}; make it shorter")


def check_number(name: str, count: int, limit: int, what: str) -> None:
    if count > limit:
        raise InvalidRequest(f"{name} has {count} {what}, and the limit is {limit}; leave some out")


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    check(ok, name, value, f"a whole number, {low} or more" if high is None else f"a whole number from {low} to {high}")
